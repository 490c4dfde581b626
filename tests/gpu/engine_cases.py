"""Operands for the engines on a GPU, the reference engine's step on them, and how far from it an engine
may be. Accuracy against fp64 has test_oracle_gpu.py, and test_hopper_numerics_gpu.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from gpu.device import DEVICE
from passes import backward

from sonicmoe.engine.interface import EngineSettings, GradientTargets
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.jit import default_cache
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing

ARCH = "sm_90a"
BF16 = torch.bfloat16
SWIGLU = ActivationType.SWIGLU
FP8 = EngineSettings(recipe=RECIPES["dx256"])
H, I, E, K = 512, 384, 6, 3
REFERENCE = ReferenceEngine()
# An FP8 code is 6 to 12 % wide: values that differ by 1e-3 disagree in 1 % of the codes, which is 1
# % of relative RMSE. A rounding to 16 bits is 1.7e-3 of it, and of db1 another one.
CLOSE, PLAIN = 0.025, 0.008


def build(jobs):
    """Compile in parallel what is not in the cache yet."""
    spec, jobs = ModelSpec(E, H, I), tuple(dict.fromkeys(jobs))
    report = warm_up(spec, default_cache(), jobs=os.cpu_count(), compile_jobs=jobs)
    assert report.complete, [outcome.message for outcome in report.kernels if outcome.message]


@dataclass
class Case:
    """Operands on the GPU in BF16 (probabilities fp32); `weights` as native w1, w2, b1, b2."""

    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    weights: tuple

    @property
    def num_experts(self):
        return int(self.weights[0].shape[0])

    @property
    def valid(self):
        return (self.indices >= 0) & (self.indices < self.num_experts)

    def routing(self, counts=None):
        return build_routing(self.indices, self.probs, self.num_experts, counts)

    def accumulators(self):
        """Zeros for the gradients of the weights."""
        w1, w2, b1, _ = self.weights
        sizes = (*(int(size) for size in w1.shape), int(w2.shape[2]))
        return GradientTargets.zeros(*sizes, b1 is not None, DEVICE)


def make_case(
    tokens=700, *, hidden=H, intermediate=I, experts=E, topk=K, bias=False, invalid=0.3, empty=(4,), seed=0
):  # fmt: skip
    """Random operands of unit scale; both sentinels at `invalid` of the slots, no token for the
    experts in `empty`.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator, device=DEVICE) * scale

    def uniform(*size):
        return torch.rand(size, generator=generator, device=DEVICE)

    scores = uniform(tokens, experts)
    scores[:, list(empty)] = -1.0
    indices = scores.topk(topk, 1).indices
    dropped = (uniform(tokens, topk) < invalid) | (scores.gather(1, indices) < 0)
    sentinel = torch.where(uniform(tokens, topk) < 0.5, -1, experts)
    weights = (
        normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5).to(BF16),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5).to(BF16),
        normal(experts, 2 * intermediate, scale=0.3) if bias else None,
        normal(experts, hidden, scale=0.3) if bias else None,
    )
    x, dout = (normal(tokens, hidden).to(BF16) for _ in range(2))
    probs = uniform(tokens, topk) + 0.05
    return Case(x, dout, torch.where(dropped, sentinel, indices), probs, weights)


def run(case, engine, settings=None, *, counts=None):
    """Everything a forward and a backward give, by name."""
    settings = settings or EngineSettings()
    weights = engine.prepare_weights(*case.weights, settings)
    out, saved = engine.forward(case.x, case.routing(counts), weights, settings)
    accumulators = case.accumulators()
    dx, dprobs = backward(engine, case.dout, saved, weights, accumulators)
    return {"out": out, "dx": dx, "dprobs": dprobs, **accumulators.named()}


def check(case, engine, settings=None, got=None):
    """Assert that every tensor is as close to the reference engine's as the order of sums explains, and
    exact zeros where no expert computes.

    An engine that quantises nothing rounds at the same places. An FP8 engine quantises the same
    values: dz and y1s are rounded to bf16 on the way, a tensor core keeps few bits of a sum, and
    both push a few codes over a rounding boundary. Few slots are few draws, and no average.
    """
    settings = settings or EngineSettings()
    got, wanted = got or run(case, engine, settings), run(case, REFERENCE, settings)
    few = 1 + 8 / max(int(case.valid.sum()), 1) ** 0.5
    bar = PLAIN if settings.recipe is None else CLOSE * few
    for name, actual in got.items():
        exact = wanted[name]
        assert actual.shape == exact.shape and actual.dtype == exact.dtype, name
        found = relative(actual.reshape(1, -1), exact.reshape(1, -1)).item()
        assert found <= bar, f"{name} is {found:.4f} from the reference engine's; at most {bar:.4f}"
    unserved = ~case.valid.any(1)
    assert bool((got["dprobs"][~case.valid] == 0).all())
    assert bool((got["out"][unserved] == 0).all()) and bool((got["dx"][unserved] == 0).all())


def relative(actual, wanted):
    """Relative RMSE along all but the first dimension; the plain norm where nothing is wanted."""
    flat = [t.double().reshape(t.shape[0], -1) for t in (actual, wanted)]
    error, norm = (flat[0] - flat[1]).norm(dim=1), flat[1].norm(dim=1)
    return torch.where(norm > 0, error / norm.clamp(min=1e-300), error)
