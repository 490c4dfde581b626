"""One engine against the reference engine, case by case, on a small problem: for a process of its
own, because a wrong kernel may end the process, spoil its CUDA context, or never end.

`trial_process.py` starts that process, watches it and judges what it says. The problem has two experts with odd
counts, an expert without tokens between them, and slots that are not here, in both spellings.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..config import SonicMoEConfig
from ..enums import is_glu
from ..layouts import NATIVE, WeightLayout
from ..quant.recipes import rows
from ..quant.reference import quantize
from ..routing.build import build_routing
from ..routing.metadata import RoutingMetadata
from ..weight_source import WeightSource
from .capabilities import format_problem
from .gradient_places import GradientPlaces
from .interface import Engine, Tokens
from .reference import ReferenceEngine
from .settings import EngineSettings, GradientMode, TokenFormat, Workload
from .targets import GradientTargets

Tensor = torch.Tensor
Array = np.ndarray[Any, Any]
Results = dict[str, Array]

# Small, because the reference engine computes every case on the host or in plain operations.
T, K, E = 150, 2, 3
COUNTS = (131, 0, 77)  # of the experts: more than a tile, none, and less than one


class Bars(NamedTuple):
    """How far outputs may be from the reference engine's: a share of its norm, and the worst element
    in units of its row's typical one.
    """

    rmse: float
    element: float


# Both engines round operands alike, so what is left is the order of additions and a rounding to
# bf16; in FP8 also the codes that flip for it, each by a sixteenth of its operand. On an H200, BF16
# is off by 3.6e-4 and 0.021, FP8 by 1.9e-2 and 0.45.
BARS, BARS_OF_FP8 = Bars(0.02, 0.25), Bars(0.04, 1.0)
_EXACT = Bars(0.0, 0.0)  # of whole numbers, and of copies
_ROW_FLOOR = 0.25  # of the typical row: rows of nearly nothing are measured against it

BEGIN, RESULT, DONE = "begin", "result", "done"  # kinds of events


@dataclass(frozen=True)
class Request:
    """What a process tries: an engine by its class, with a workload on a device, under these settings
    of the configuration.
    """

    engine: Callable[[], Engine]
    workload: Workload
    device: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One way of calling an engine. `run` returns all of its outputs by name; bars: what they are
    held to, None: what the settings say.
    """

    name: str
    run: Callable[[Engine], Results]
    bars: Bars | None = None


class Problem:
    """Seeded operands of a workload on a device, and the reference engine's results."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.settings, self.device = workload, workload.settings, device
        self.hidden, self.inner = workload.hidden_size, workload.intermediate_size
        self.n1 = self.inner * (2 if is_glu(self.settings.activation) else 1)
        # NumPy draws the operands, so that both frameworks and all devices try the same numbers.
        rng = np.random.default_rng(0)

        def normal(*shape: int, scale: float = 1.0, dtype: str = workload.dtype) -> Tensor:
            values = (rng.standard_normal(shape) * scale).astype(np.float32)
            return torch.tensor(values, device=device).to(getattr(torch, dtype))

        self.x, self.dout = normal(T, self.hidden), normal(T, self.hidden)
        self.w1 = normal(E, self.n1, self.hidden, scale=self.hidden**-0.5)
        self.w2 = normal(E, self.hidden, self.inner, scale=self.inner**-0.5)
        self.b1 = normal(E, self.n1, dtype="float32") if workload.bias else None
        self.b2 = normal(E, self.hidden, dtype="float32") if workload.bias else None
        self.probs = rng.uniform(0.1, 1.0, (T, K)).astype(np.float32)
        self.indices = _indices(rng)
        # Cases read this one. The case "routing" builds it again and compares it.
        self.routing = self.routed(device)

    def routed(self, device: str) -> RoutingMetadata:
        indices, probs = (torch.tensor(a, device=device) for a in (self.indices, self.probs))
        return build_routing(indices, probs, E, alignment=self.settings.row_alignment)

    def route(self, _: Engine) -> Results:
        """The metadata, by the kernels that all engines share; a host computes it plainly."""
        return _metadata(self.routed(self.device))

    def quantised(self) -> tuple[Tokens, Tokens]:
        """x and dout as their sender quantised them."""
        x, dout = (quantize(t.to(torch.float32), rows(128)) for t in (self.x, self.dout))
        return x, dout

    def infer(self, engine: Engine) -> Results:
        # Prepared in every run, because preparing launches kernels too.
        weights = self._weights(engine)
        out, _ = engine.forward(self.x, self.routing, weights, self.settings, save=False)
        return {"out": _numbers(out)}

    def train(
        self,
        engine: Engine,
        targets: Callable[[], GradientTargets] | None = None,
        tokens: tuple[Tokens, Tokens] | None = None,
        layout: WeightLayout = NATIVE,
    ) -> Results:
        """Forward and backward; weight gradients are added to ones, and these taken off again.

        targets: makes what they are added to, instead of accumulators. layout: of the weights, which
        an engine may read as they lie.
        """
        x, dout = tokens or (self.x, self.dout)
        weights = self._weights(engine, layout)
        out, saved = engine.forward(x, self.routing, weights, self.settings)
        assert saved is not None
        dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
        # Made anew in every run: a second run must not find what the first one added.
        added = (targets or self.accumulators)()
        engine.backward_dw(pending, added)
        found = {"out": _numbers(out), "dx": _numbers(dx), "dprobs": _numbers(dprobs)}
        # Fresh memory is written; everything else began at ones, so an engine that overwrites
        # instead of adding is off by one.
        before = 0.0 if added.mode is GradientMode.FRESH else 1.0
        for name in ("dw1", "dw2", "db1", "db2"):
            sums = added.sums(name) if name in ("dw1", "dw2") or self.workload.bias else None
            if sums is not None:
                found[name] = _numbers(sums) - before
        return found

    def accumulators(self) -> GradientTargets:
        # Ones and not zeros: adding to zeros looks like overwriting.
        made = GradientTargets.zeros(
            E, self.n1, self.hidden, self.inner, self.workload.bias, self.device
        )
        for tensor in made.tensors():
            tensor.fill_(1.0)
        return made

    def parameters(
        self, mode: GradientMode, layout: WeightLayout, stacked: bool
    ) -> GradientTargets:
        """Memory as the parameters of both projections in this layout have it; fresh memory holds
        NaN before.
        """
        fill, made = (float("nan") if mode is GradientMode.FRESH else 1.0), []
        for shape in ((self.n1, self.hidden), (self.hidden, self.inner)):
            matrix = shape[::-1] if layout.transposed else shape
            shapes = [(E, *matrix)] if stacked else [matrix] * E
            zeros = [torch.zeros(s, dtype=torch.float32, device=self.device) for s in shapes]
            tensors = [tensor + fill for tensor in zeros]  # Paddle's fill_ refuses NaN
            made.append(
                GradientPlaces.stacked(tensors[0], E, layout)
                if stacked
                else GradientPlaces.per_expert(tensors, layout)
            )
        up, down = made
        return GradientTargets(up, down, mode)

    def _weights(self, engine: Engine, layout: WeightLayout = NATIVE) -> Any:
        w1, w2 = layout.user_w1(self.w1), layout.user_w2(self.w2)
        b1 = None if self.b1 is None else layout.user_b1(self.b1)
        source = WeightSource.stacked(w1, w2, b1, self.b2, layout)
        if self.workload.separate:
            up, down = ([matrix.clone() for matrix in side] for side in (source.up, source.down))
            source = replace(source, up=up, down=down)
        return engine.refresh(source, self.settings)


def _indices(rng: np.random.Generator) -> Array:
    """Ids `[T, K]` with `COUNTS` tokens of each expert; the other slots are not here."""
    # Both spellings of "not here", and an expert that is named in either slot.
    ids = np.full((T, K), -1, np.int64)
    ids[::3] = E
    ids[: COUNTS[0], 0] = 0
    ids[-COUNTS[2] :, 1] = 2
    return np.asarray(ids[rng.permutation(T)])


def _metadata(routing: RoutingMetadata) -> Results:
    found = {
        name: _numbers(tensor)
        for name, tensor in zip(routing.TENSOR_FIELDS, routing.tensors(), strict=True)
    }
    # On a GPU there may be padding rows behind everybody's.
    rows = int(found["padded_offsets"][-1])
    return {name: a[:rows] if name.startswith("row_") else a for name, a in found.items()}


def _numbers(tensor: Tensor) -> Array:
    """fp32 on the host; waits for the device, so a kernel's error comes up here."""
    return np.asarray(tensor.detach().to(torch.float32).cpu().numpy())


def cases(problem: Problem, engine: Engine) -> Iterator[tuple[Case, Results]]:
    """Every way of calling this engine with the workload, and the reference engine's outputs."""
    golden = ReferenceEngine()
    wanted = problem.train(golden)
    # The reference engine runs first and alone: a later kernel that writes where it should not
    # cannot change what is expected.
    form, train_quantised = TokenFormat.E4M3_1X128, None
    if all(format_problem(engine.record, problem.settings, form, o) is None for o in ("x", "dout")):
        train_quantised = functools.partial(problem.train, tokens=problem.quantised())
        wanted_quantised = train_quantised(golden)
    yield Case("routing", problem.route, _EXACT), _metadata(problem.routed("cpu"))
    yield Case("inference", problem.infer), {"out": wanted["out"]}
    yield Case("training", problem.train), wanted
    if train_quantised is not None:
        yield Case(f"tokens as {form.value}", train_quantised), wanted_quantised
    # No parameter layout holds biases: engines add their gradients to accumulators only.
    if not problem.workload.bias:
        yield from _target_cases(problem, engine, wanted)


def _target_cases(
    problem: Problem, engine: Engine, wanted: Results
) -> Iterator[tuple[Case, Results]]:
    """Weights in every layout, and gradients into the parameters' own memory in the layouts that the
    engine adds or writes to.
    """
    halves = (False, True) if is_glu(problem.settings.activation) else (False,)
    # Every layout is one launch more. Together they cost less than loading the kernels.
    for transposed, split_half, stacked in itertools.product((False, True), halves, (False, True)):
        layout = WeightLayout(transposed, split_half)
        where = [name for name, is_so in vars(layout).items() if is_so] + ["stacked"] * stacked
        for mode, words in _MODES.items():
            make = functools.partial(problem.parameters, mode, layout, stacked)
            if _adds_to(problem, engine, make(), layout):
                name = f"gradients into {words} ({', '.join(where) or 'native'})"
                train = functools.partial(problem.train, targets=make, layout=layout)
                yield Case(name, train), wanted


_MODES = {GradientMode.MAIN_GRAD: "main_grad", GradientMode.FRESH: "fresh memory"}


def _adds_to(
    problem: Problem, engine: Engine, targets: GradientTargets, layout: WeightLayout
) -> bool:
    reason = engine.problem_of(targets, problem.settings, layout)
    if targets.mode is GradientMode.FRESH:
        return engine.writes_gradients(problem.settings, problem.device) and reason is None
    return GradientMode.MAIN_GRAD in engine.record.gradients and reason is None


def distance(found: Array, wanted: Array) -> tuple[float, float]:
    """`(relative RMSE, largest deviation of an element in units of its row's typical one)`; infinite
    where a value is not finite.
    """
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf"), float("inf")
    a, g = (array.reshape(-1, array.shape[-1]).astype(np.float64) for array in (found, wanted))
    # A row of nearly nothing has no scale of its own: its errors are those of the rows around it.
    off, norm = np.abs(a - g), float(np.linalg.norm(g))
    typical = np.sqrt(np.mean(g**2, axis=1))
    scale = np.maximum(typical, _ROW_FLOOR * np.sqrt(np.mean(typical**2)))
    if norm == 0.0:
        return (0.0, 0.0) if not off.any() else (float("inf"), float("inf"))
    return float(np.linalg.norm(off)) / norm, float((off / scale[:, None]).max())


def bars_of(settings: EngineSettings) -> Bars:
    """What an engine is held to with these settings."""
    return BARS if settings.recipe is None else BARS_OF_FP8


def judged(engine: Engine, case: Case, wanted: Results, bars: Bars) -> dict[str, Any]:
    """Run a case twice. `problem`: what is wrong, in words, or None."""
    # Twice, because equal calls must give equal bits.
    first, second = case.run(engine), case.run(engine)
    errors = {name: distance(first[name], values) for name, values in wanted.items()}
    return {
        "event": RESULT,
        "case": case.name,
        "errors": {name: list(found) for name, found in errors.items()},
        "problem": _problem(errors, case.bars or bars, first, second),
    }


def _problem(
    errors: dict[str, tuple[float, float]], bars: Bars, first: Results, second: Results
) -> str | None:
    for name, (rmse, element) in errors.items():
        if math.isinf(rmse):
            return f"{name} is not finite"
        if not rmse <= bars.rmse:
            return (
                f"{name} is {rmse:.2%} away from the reference engine's, of at most {bars.rmse:.0%}"
            )
        if not element <= bars.element:
            return (
                f"an element of {name} is {element:.2f} of its row's typical one away from the "
                f"reference engine's, of at most {bars.element}"
            )
    # Last, because a wrong number says more than one that changes.
    differing = [name for name in first if not np.array_equal(first[name], second[name])]
    return f"two equal calls differ in {differing[0]}" if differing else None


def run(request: Request, say: Callable[[dict[str, Any]], None]) -> None:
    """Try the engine of a request; `say` gets every event."""
    engine, problem = request.engine(), Problem(request.workload, request.device)
    bars = bars_of(problem.settings)
    # Cases come one by one: what a later one needs is made when the earlier ones have been told.
    # The first one comes when the reference engine has run, so this device computes.
    for case, wanted in cases(problem, engine):
        say({"event": BEGIN, "case": case.name})
        say(judged(engine, case, wanted, bars))
    say({"event": DONE})


def main(descriptor: int) -> NoReturn:
    """Read the request from standard input, try, and write what happens to an open descriptor."""
    status = 0
    with open(descriptor, "w", encoding="utf-8") as events:

        def say(event: dict[str, Any]) -> None:
            # Flushed, because the next call may end this process.
            print(json.dumps(event), file=events, flush=True)

        try:
            request: Request = pickle.load(sys.stdin.buffer)
            with SonicMoEConfig(**request.config).activate():
                run(request, say)
        except Exception:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        # Not through the interpreter's end: after a fault of the GPU destructors may fail or wait.
        os._exit(status)
