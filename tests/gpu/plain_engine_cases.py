"""Operands for the engines that quantise nothing, and how far from fp32 their results may be.

The yardstick is the reference engine in fp32: an engine may lose what the reference engine loses by
rounding at the same places. It is held against every expert and every block of 128 tokens.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

import torch
from gpu.activation_cases import OWN, gain_of
from public_models import EXPERT_SIZES

from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.jit import default_cache
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.routing.build import build_routing

SWIGLU, ARCH = ActivationType.SWIGLU, "sm_90a"
BF16, FP16 = torch.bfloat16, torch.float16
H, I, E, K = 512, 384, 6, 3
SIZES_OF_NO_TILE = [(200, 72), (64, 8), (1032, 520)]
# H and I at which 860 032 tokens give tensors of more than 2^31 elements.
MANY_TOKENS, SMALL = 860_032, (128, 1280)
REFERENCE = ReferenceEngine()


def shapes(make):
    """The layers of the contract, by the engine's own record of a layer: `MlpShape` or
    `ExpertShape`.
    """
    for activation in ActivationType:
        for bias in (False, True):
            yield make(H, I, activation, "bfloat16", bias, arch=ARCH)
    for activation, own in OWN.items():
        yield make(H, I, activation, parameters=own, arch=ARCH)
    for activation in (SWIGLU, ActivationType.GELU):
        yield make(H, I, activation, "float16", arch=ARCH)
    for hidden, intermediate in (*EXPERT_SIZES.values(), SMALL):
        yield make(hidden, intermediate, SWIGLU, arch=ARCH)
    for hidden, intermediate in SIZES_OF_NO_TILE:
        yield make(hidden, intermediate, SWIGLU, bias=True, arch=ARCH)


def kernels_of_the_contract(make, kernels):
    """What the tests of the contract launch; `kernels`: `all_kernels` or `all_variants`."""
    return [
        kernel
        for shape in shapes(make)
        for kernel in kernels(shape, recompute_z=shape.activation is SWIGLU)
    ]


def build(jobs):
    """Compile in parallel what is not in the cache yet."""
    report = warm_up(
        ModelSpec(E, H, I),
        default_cache(),
        jobs=os.cpu_count(),
        compile_jobs=tuple(dict.fromkeys(jobs)),
    )
    assert report.complete, [outcome.message for outcome in report.kernels if outcome.message]


@dataclass
class Case:
    """Operands on the GPU in one dtype; `weights` as native w1, w2, b1, b2."""

    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    weights: tuple
    activation: ActivationType
    parameters: tuple = ()

    @property
    def num_experts(self):
        return int(self.weights[0].shape[0])

    @property
    def routing(self):
        return build_routing(self.indices, self.probs, self.num_experts)

    def to(self, dtype):
        w1, w2, b1, b2 = self.weights
        weights = (w1.to(dtype), w2.to(dtype), b1, b2)
        return replace(self, x=self.x.to(dtype), dout=self.dout.to(dtype), weights=weights)

    def accumulators(self):
        """Zeros for the gradients of the weights."""
        w1, w2, b1, _ = self.weights
        sizes = (*(int(size) for size in w1.shape), int(w2.shape[2]))
        return NativeBuffer.zeros(*sizes, b1 is not None, "cuda")


def make_case(
    tokens=700, *, hidden=H, intermediate=I, experts=E, topk=K, activation=SWIGLU, bias=False, dtype=BF16, invalid=0.3, empty=(4,), seed=0
):  # fmt: skip
    """Random operands of unit scale; both sentinels at `invalid` of the slots, no token for the
    experts in `empty`.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator, device="cuda") * scale

    scores = torch.rand((tokens, experts), generator=generator, device="cuda")
    scores[:, list(empty)] = -1.0
    indices = scores.topk(topk, 1).indices
    indices = torch.where(scores.gather(1, indices) < 0, -1, indices)
    dropped = torch.rand((tokens, topk), generator=generator, device="cuda") < invalid
    sentinel = torch.where(
        torch.rand((tokens, topk), generator=generator, device="cuda") < 0.5, -1, experts
    )
    probs = torch.rand((tokens, topk), generator=generator, device="cuda") + 0.05
    n1 = intermediate * (2 if is_glu(activation) else 1)
    gain = gain_of(activation)
    weights = (
        normal(experts, n1, hidden, scale=gain * hidden**-0.5).to(dtype),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5).to(dtype),
        normal(experts, n1, scale=0.3) if bias else None,
        normal(experts, hidden, scale=0.3) if bias else None,
    )
    x, dout = normal(tokens, hidden).to(dtype), normal(tokens, hidden).to(dtype)
    return Case(x, dout, torch.where(dropped, sentinel, indices), probs, weights, activation)


def run(case, engine, *, accumulators=None, settings=None, routing=None):
    """Everything a forward and a backward give, by name."""
    own = case.parameters
    settings = settings or EngineSettings(case.activation, activation_parameters=own)
    weights = engine.prepare_weights(*case.weights, settings)
    out, saved = engine.forward(case.x, routing or case.routing, weights, settings)
    accumulators = accumulators or case.accumulators()
    dx, dprobs = engine.backward(case.dout, saved, weights, accumulators)
    return {"out": out, "dx": dx, "dprobs": dprobs, **accumulators.named()}


def relative(actual, wanted):
    """Relative RMSE along all but the first dimension; the plain norm where nothing is wanted."""
    flat = [t.double().reshape(t.shape[0], -1) for t in (actual, wanted)]
    error, norm = (flat[0] - flat[1]).norm(dim=1), flat[1].norm(dim=1)
    return torch.where(norm > 0, error / norm.clamp(min=1e-300), error)


def blocks(tensor, rows=128):
    """`[T, H]` -> `[T / 128, 128 H]`, the last block filled up with zeros."""
    missing = -tensor.shape[0] % rows
    return torch.nn.functional.pad(tensor.double(), (0, 0, 0, missing)).reshape(
        -1, rows * tensor.shape[1]
    )


def per_expert(dprobs, case):
    """`[T, K]` -> `[E, T * K]`: the slots of each expert."""
    flat, index = dprobs.double().reshape(-1), case.indices.reshape(-1)
    return torch.stack([torch.where(index == e, flat, 0.0) for e in range(case.num_experts)])


def check(case, actual):
    """Assert that no tensor, in any expert or block, is further from fp32 than the reference
    engine's rounding puts it.
    """
    exact, rounded = run(case.to(torch.float32), REFERENCE), run(case, REFERENCE)
    assert actual.keys() == exact.keys()
    for name, got in actual.items():
        split = {
            "out": blocks,
            "dx": blocks,
            "dprobs": functools.partial(per_expert, case=case),
        }.get(name, lambda t: t)
        assert got.shape == exact[name].shape, name
        assert bool(torch.isfinite(got).all()), name
        ours, theirs = (relative(split(t), split(exact[name])) for t in (got, rounded[name]))
        # db1 sums dz as it is stored; the reference engine sums it before rounding to bf16, whose
        # relative RMSE is 1.7e-3.
        slack = 3e-3 if name == "db1" else 2e-4
        assert bool((ours <= 1.2 * theirs + slack).all()), (name, ours.tolist(), theirs.tolist())
    invalid = (case.indices < 0) | (case.indices >= case.num_experts)
    assert bool((actual["dprobs"][invalid] == 0).all())
    for name in ("out", "dx"):
        assert bool((actual[name][invalid.all(1)] == 0).all()), name


def assert_same_bits(actual, wanted):
    """Of every tensor in `wanted`."""
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name


def fill_free_memory(value):
    """Leave `value` in what the allocator will hand out next, in large blocks and in small ones."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((2**28,), value, device="cuda")]
    held += [torch.full((2**17,), value, device="cuda") for _ in range(256)]
    torch.cuda.synchronize()
    del held
