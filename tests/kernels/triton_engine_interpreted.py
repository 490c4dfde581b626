"""Run under TRITON_INTERPRET=1: the Triton engine on the host against the reference engine.
`python -m kernels.triton_engine_interpreted CHECK...`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from kernels.triton_interpreter import repair

repair()

from sonicmoe.engine import triton as triton_engine  # noqa: E402
from sonicmoe.engine.gpu import Gpu  # noqa: E402
from sonicmoe.engine.interface import (  # noqa: E402
    EngineSettings,
    FreshTargets,
    NativeBuffer,
    ParameterTargets,
    WeightTarget,
)
from sonicmoe.engine.reference import ReferenceEngine  # noqa: E402
from sonicmoe.engine.triton import TritonEngine  # noqa: E402
from sonicmoe.enums import ActivationType, is_glu  # noqa: E402
from sonicmoe.layouts import WeightLayout  # noqa: E402
from sonicmoe.routing.build import build_routing  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
# No tile divides these; of the experts one has two tiles, one none, and one a single row.
T, H, I, E, K = 150, 72, 40, 4, 2
SWIGLU = ActivationType.SWIGLU
OWN = {
    ActivationType.SWIGLU_OAI: (("alpha", 1.1), ("limit", 1.5)),
    ActivationType.SWIGLU_CLAMP: (("limit", 1.5),),
    ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 2.5)),
}
OURS, REFERENCE = TritonEngine(), ReferenceEngine()


@dataclass
class Case:
    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    weights: tuple
    settings: EngineSettings

    @property
    def routing(self):
        return build_routing(self.indices, self.probs, E)


def make_case(activation=SWIGLU, *, bias=True, dtype=BF16, own=(), **settings):
    generator = torch.Generator().manual_seed(0)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator) * scale

    # Expert 0 and 2 share the tokens, 1 has none, 3 has one.
    first = torch.rand((T, 1), generator=generator) < 0.9
    second = torch.rand((T, 1), generator=generator) < 0.3
    indices = torch.cat([torch.where(first, 0, -1), torch.where(second, 2, E)], 1)
    indices[7, 1] = 3
    n1 = I * (2 if is_glu(activation) else 1)
    weights = (
        normal(E, n1, H, scale=2 * H**-0.5).to(dtype),
        normal(E, H, I, scale=I**-0.5).to(dtype),
        normal(E, n1, scale=0.3) if bias else None,
        normal(E, H, scale=0.3) if bias else None,
    )
    chosen = EngineSettings(activation, activation_parameters=own, **settings)
    probs = torch.rand((T, K), generator=generator) + 0.05
    return Case(normal(T, H).to(dtype), normal(T, H).to(dtype), indices, probs, weights, chosen)


def run(case, engine=OURS, targets=None):
    weights = engine.prepare_weights(*case.weights, case.settings)
    out, saved = engine.forward(case.x, case.routing, weights, case.settings)
    w1, _, b1, _ = case.weights
    sizes = int(w1.shape[1]), H, I
    targets = targets or NativeBuffer.zeros(E, *sizes, b1 is not None, "cpu")
    dx, dprobs = engine.backward(case.dout, saved, weights, targets)
    named = {"out": out, "dx": dx, "dprobs": dprobs}
    return named | (targets.named() if isinstance(targets, NativeBuffer) else {})


def close(case):
    actual, wanted = run(case), run(case, REFERENCE)
    assert actual.keys() == wanted.keys()
    for name, got in actual.items():
        one, other = got.double(), wanted[name].double()
        assert one.shape == other.shape and bool(torch.isfinite(one).all()), name
        error = float((one - other).norm() / other.norm())
        # Sums of another order move single roundings; db1 sums dz as it is stored, rounded.
        bound = 3e-3 if name == "db1" else 3e-4
        assert error < bound, (case.settings.activation, name, error)


def same_bits(actual, wanted):
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name


def activations() -> int:
    for number, activation in enumerate(ActivationType):
        options = {"dtype": (BF16, FP16)[number % 2], "bias": number % 3 != 0}
        close(make_case(activation, own=OWN.get(activation, ()), **options))
    return len(ActivationType)


def tiles() -> int:
    """Those of the other architectures, and a part of the GPU."""
    wanted = run(make_case())
    with_gpu("sm_90a", 1)
    close(make_case())
    with_gpu("sm_80", 8)
    same_bits(run(make_case(gemm_num_sms=3)), wanted)
    with_gpu("sm_80", 1)
    return 2


def with_gpu(arch, multiprocessors):
    triton_engine._gpu = lambda tensor: Gpu(arch, multiprocessors)


def modes() -> int:
    """z recomputed or freed, inference, and memory that nobody wrote."""
    case = make_case()
    stored = run(case)
    same_bits(run(replace(case, settings=replace(case.settings, recompute_z=True))), stored)
    same_bits(run(replace(case, settings=replace(case.settings, frees_stagewise=True))), stored)
    weights = OURS.prepare_weights(*case.weights, case.settings)
    out, saved = OURS.forward(case.x, case.routing, weights, case.settings, save=False)
    assert saved is None and torch.equal(out, stored["out"])
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    same_bits(run(case), stored)
    torch.use_deterministic_algorithms(False)
    return 4


def bad_tokens() -> int:
    """Of a token that is NaN nothing reaches other tokens and experts: padding rows included."""
    for which in ("x", "dout"):
        case = make_case(bias=False)
        clean = run(case)
        getattr(case, which)[7] = float("nan")  # of experts 0 and 3
        spoilt = run(case)
        for name in ("dw1", "dw2"):
            assert torch.equal(spoilt[name][1:3], clean[name][1:3]), name
            assert not bool(torch.isfinite(spoilt[name][3]).all()), name
        for name in ("out", "dx", "dprobs"):
            others = [t for t in range(T) if t != 7]
            assert torch.equal(spoilt[name][others], clean[name][others]), name
    return 2


def targets() -> int:
    """Weight gradients in every layout: added to stacked and single matrices, and written."""
    case = make_case(bias=False)
    wanted = run(case)
    weights = OURS.prepare_weights(*case.weights, case.settings)
    _, saved = OURS.forward(case.x, case.routing, weights, case.settings)
    _, _, pending = OURS.backward_dx(case.dout, saved, weights)
    checked = 0
    for number in range(8):
        layout = WeightLayout(transposed=bool(number & 1), split_half=bool(number & 2))
        stacked = bool(number & 4)
        for kind, dtype in (
            (ParameterTargets, torch.float32),
            (FreshTargets, BF16 if stacked else torch.float32),
        ):
            found = targets_of(layout, kind, stacked, dtype)
            if kind is ParameterTargets:
                assert OURS.problem_of(found, case.settings) is None
            OURS.backward_dw(replace(pending), found)  # which releases the copy's operands
            for name in ("dw1", "dw2"):
                sums = wanted[name] + (1.0 if kind is ParameterTargets else 0.0)
                assert torch.equal(found.sums(name), sums.to(dtype)), (layout, stacked, name)
            checked += 1
    return checked


def targets_of(layout, kind, stacked, dtype):
    """Memory that holds ones where it is added to, and NaN where it is written."""
    fill = 1.0 if kind is ParameterTargets else float("nan")

    def target(height, width):
        shape = (width, height) if layout.transposed else (height, width)
        if stacked:
            return WeightTarget.stacked(torch.full((E, *shape), fill, dtype=dtype), E, layout)
        matrices = [torch.full(shape, fill, dtype=dtype) for _ in range(E)]
        return WeightTarget.per_expert(matrices, layout)

    return kind(target(2 * I, H), target(H, I))


def no_rows() -> int:
    """No valid slot at all: zeros, and written gradients are zeros."""
    case = make_case(bias=False)
    case.indices.fill_(-1)
    got = run(case)
    assert all(bool((tensor == 0).all()) for tensor in got.values())
    written = targets_of(WeightLayout(), FreshTargets, True, torch.float32)
    run(case, targets=written)
    assert all(bool((tensor == 0).all()) for tensor in written.tensors())
    return 2


CHECKS = {
    check.__name__: check for check in (activations, tiles, modes, bad_tokens, targets, no_rows)
}

if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, CHECKS[check](), "checked")
