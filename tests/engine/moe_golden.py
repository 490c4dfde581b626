"""Problems of one layer for tests of engines and of the node, with the golden of tests/oracle.

User layouts throughout: `up_gate [E, H, N1]` split-half with gate first (N1 = 2I) or ungated (N1 =
I), `down [E, I, H]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from framework import numpy, tensor, torch
from oracle import golden as exact
from oracle.case import GATED
from oracle.golden import GAINS
from passes import backward

from sonicmoe.engine.interface import EngineSettings, GradientTargets
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing

ALL_ACTIVATIONS = list(ActivationType)
OUTPUTS = ("out", "dx", "dprobs", "dw1", "dw2")
PLAIN, FP8 = EngineSettings(), EngineSettings(recipe=RECIPES["dx256"])
ROWS = EngineSettings(recipe=RECIPES["1x128"], save_z=ZCode.E4M3)
SETTINGS = {"plain": PLAIN, "dx256": FP8, "1x128": ROWS}
MODES = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@dataclass(frozen=True)
class Problem(exact.Scene):
    """A scene of the oracle whose activation is an `ActivationType`."""

    @property
    def intermediate(self):
        return self.down.shape[1]

    @property
    def gated(self):
        return self.activation.value in GATED

    def but(self, **changes):
        return replace(self, **changes)


@dataclass
class Result:
    """Outputs and gradients, weights' in user layout."""

    out: np.ndarray
    dx: np.ndarray
    dprobs: np.ndarray
    dw1: np.ndarray
    dw2: np.ndarray
    db1: np.ndarray | None = None
    db2: np.ndarray | None = None

    def items(self):
        return [(name, got) for name, got in vars(self).items() if got is not None]


def dispatch(rng, tokens, experts, topk, empty=()):
    """Indices `[T, K]`: distinct experts in a row, none of `empty`, both sentinels in any position."""
    pool = np.array([e for e in range(experts) if e not in empty] + [-1, experts, -1, experts + 5])
    rows = [rng.permutation(pool)[:topk] for _ in range(tokens)]
    return np.array(rows, np.int64).reshape(tokens, topk)


def rounded(array, dtype):
    """fp64 values after rounding to `dtype`."""
    return numpy(tensor(array, torch.float32).to(dtype))


def make_problem(
    activation=ActivationType.SWIGLU,
    *,
    tokens=37,
    hidden=80,
    intermediate=48,
    experts=4,
    topk=3,
    bias=False,
    empty=(2,),
    dtype=None,
    seed=0,
):
    rng = np.random.default_rng(seed)
    dtype = dtype or torch.float32
    n1 = intermediate * (2 if activation.value in GATED else 1)
    gain = GAINS.get(activation.value, 1.0)

    def normal(*shape, scale=1.0):
        return rounded(rng.standard_normal(shape) * scale, dtype)

    def fp32(array):
        return np.asarray(array, np.float32).astype(np.float64)

    return Problem(
        activation=activation,
        x=normal(tokens, hidden),
        indices=dispatch(rng, tokens, experts, topk, empty),
        probs=fp32(rng.uniform(0.05, 1.0, (tokens, topk))),
        dout=normal(tokens, hidden),
        up_gate=normal(experts, hidden, n1, scale=gain * hidden**-0.5),
        down=normal(experts, intermediate, hidden, scale=intermediate**-0.5),
        b1=fp32(rng.standard_normal((experts, n1)) * 0.3) if bias else None,
        b2=fp32(rng.standard_normal((experts, hidden)) * 0.3) if bias else None,
    )


def golden(problem: Problem) -> Result:
    """Forward and backward in fp64."""
    found = exact.golden(problem.but(activation=problem.activation.value))
    return Result(**{name: found[name] for name in vars(Result(*[None] * 5)) if name in found})


def factors_of(problem, rank=5):
    """fp64 `(a [E, R, in], b [E, out, R])` of low-rank adapters on the up- and the down-projection."""
    rng = np.random.default_rng(1)
    experts, hidden, n1 = problem.up_gate.shape
    sizes = ((hidden, n1), (problem.intermediate, hidden))
    return [
        (rng.standard_normal((experts, rank, i)) * i**-0.5, rng.standard_normal((experts, o, rank)))
        for i, o in sizes
    ]


def native_order(n1, gated):
    """Which column of a user's `[H, N1]` weight lies in each row of the native `[N1, H]` one."""
    return np.arange(n1).reshape(2, -1).T.reshape(-1) if gated else np.arange(n1)


def native_weights(problem):
    """fp64 `w1 [E, N1, H]`, `w2 [E, H, I]`, `b1`, `b2` in the engine's layout."""
    order = native_order(problem.up_gate.shape[2], problem.gated)
    w1 = problem.up_gate.transpose(0, 2, 1)[:, order]
    w2 = problem.down.transpose(0, 2, 1)
    return w1, w2, None if problem.b1 is None else problem.b1[:, order], problem.b2


@dataclass
class Setup:
    """A problem as the engine takes it."""

    problem: Problem
    settings: EngineSettings
    engine: object
    weights: object
    routing: object
    x: object
    dout: object

    def accumulators(self):
        experts, hidden, n1 = self.problem.up_gate.shape
        bias = self.problem.b1 is not None
        return GradientTargets.zeros(experts, n1, hidden, self.problem.intermediate, bias, "cpu")

    def forward(self):
        return self.engine.forward(self.x, self.routing, self.weights, self.settings)

    def pending(self):
        """The operands of the weight gradients."""
        _, saved = self.forward()
        return self.engine.backward_dx(self.dout, saved, self.weights)[2]

    def run(self) -> Result:
        """A whole step; weight gradients in user layout."""
        (out, saved), sums = self.forward(), self.accumulators()
        dx, dprobs = backward(self.engine, self.dout, saved, self.weights, sums)
        named = {name: numpy(gradient) for name, gradient in sums.named().items()}
        back = np.argsort(native_order(self.problem.up_gate.shape[2], self.problem.gated))
        gradients = {name: named[name].transpose(0, 2, 1) for name in ("dw1", "dw2")}
        gradients["dw1"] = gradients["dw1"][:, :, back]
        if "db1" in named:
            gradients |= {"db1": named["db1"][:, back], "db2": named["db2"]}
        return Result(numpy(out), numpy(dx), numpy(dprobs), **gradients)


def set_up(problem, settings=None, dtype=torch.float32) -> Setup:
    engine = ReferenceEngine()
    own = {"activation": problem.activation, "activation_parameters": problem.own}
    settings = replace(settings or EngineSettings(), **own)
    w1, w2, b1, b2 = native_weights(problem)
    biases = [None if b is None else tensor(b, torch.float32) for b in (b1, b2)]
    weights = engine.prepare_weights(tensor(w1).to(dtype), tensor(w2).to(dtype), *biases, settings)
    routed = tensor(problem.indices), tensor(problem.probs, torch.float32), problem.num_experts
    routing = build_routing(*routed, alignment=settings.row_alignment)
    x, dout = (tensor(array, torch.float32).to(dtype) for array in (problem.x, problem.dout))
    return Setup(problem, settings, engine, weights, routing, x, dout)


def run_engine(problem, settings=None, dtype=torch.float32) -> Result:
    return set_up(problem, settings, dtype).run()


def assert_same_bits(actual: Result, expected: Result, names=None, rows=slice(None)):
    """Of all outputs, or of some; in all rows (tokens or experts), or in some."""
    for name, got in actual.items():
        if names is None or name in names:
            np.testing.assert_array_equal(got[rows], getattr(expected, name)[rows], err_msg=name)
