"""Run under TRITON_INTERPRET=1: the Triton engine on the host against the reference engine.
`python -m kernels.triton_engine_interpreted CHECK...`.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from kernels.triton_interpreter import repair

repair()

from engine.fp8_layer import assert_same_bits, parameter_targets  # noqa: E402
from engine.plain_layer import (  # noqa: E402
    BF16,
    FP16,
    E,
    H,
    I,
    T,
    assert_adapted_close,
    assert_close,
    make_case,
)
from engine.plain_layer import run as run_on  # noqa: E402

from sonicmoe.engine import triton as triton_engine  # noqa: E402
from sonicmoe.engine.gpu import Gpu  # noqa: E402
from sonicmoe.engine.interface import (  # noqa: E402
    GradientMode,
)
from sonicmoe.engine.triton import TritonEngine  # noqa: E402
from sonicmoe.enums import ActivationType  # noqa: E402
from sonicmoe.layouts import WeightLayout  # noqa: E402

OWN = {
    ActivationType.SWIGLU_OAI: (("alpha", 1.1), ("limit", 1.5)),
    ActivationType.SWIGLU_CLAMP: (("limit", 1.5),),
    ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 2.5)),
}
OURS = TritonEngine()


def run(case, targets=None):
    return run_on(case, OURS, targets)


def activations() -> int:
    for number, activation in enumerate(ActivationType):
        options = {"dtype": (BF16, FP16)[number % 2], "bias": number % 3 != 0}
        assert_close(make_case(activation, own=OWN.get(activation, ()), **options), OURS)
    return len(ActivationType)


def tiles() -> int:
    """Those of the other architectures, and a part of the GPU."""
    wanted = run(make_case())
    with_gpu("sm_90a", 1)
    assert_close(make_case(), OURS)
    with_gpu("sm_80", 8)
    assert_same_bits(run(make_case(gemm_num_sms=3)), wanted)
    with_gpu("sm_80", 1)
    return 2


def with_gpu(arch, multiprocessors):
    triton_engine._gpu = lambda tensor: Gpu(arch, multiprocessors)


def modes() -> int:
    """z recomputed or freed, inference, and memory that nobody wrote."""
    case = make_case()
    stored = run(case)
    assert_same_bits(run(case.but(recompute_z=True)), stored)
    assert_same_bits(run(case.but(frees_stagewise=True)), stored)
    _, out, saved = case.forward(OURS, save=False)
    assert saved is None and torch.equal(out, stored["out"])
    pending = case.pending(OURS)
    for _ in range(2):  # biases by themselves, as often as asked
        db1, db2 = OURS.bias_gradients(pending)
        assert torch.equal(db1, stored["db1"]) and torch.equal(db2, stored["db2"])
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    assert_same_bits(run(case), stored)
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
    pending = case.pending(OURS)
    checked = 0
    for number in range(8):
        layout = WeightLayout(transposed=bool(number & 1), split_half=bool(number & 2))
        stacked = bool(number & 4)
        for mode, dtype in (
            (GradientMode.MAIN_GRAD, torch.float32),
            (GradientMode.FRESH, BF16 if stacked else torch.float32),
        ):
            found = targets_of(layout, mode, stacked, dtype)
            if mode is GradientMode.MAIN_GRAD:
                assert OURS.problem_of(found, case.settings) is None
            OURS.backward_dw(replace(pending), found)  # which releases the copy's operands
            for name in ("dw1", "dw2"):
                sums = wanted[name] + (1.0 if mode is GradientMode.MAIN_GRAD else 0.0)
                assert torch.equal(found.sums(name), sums.to(dtype)), (layout, stacked, name)
            checked += 1
    layout = WeightLayout(split_half=True, apart=True)
    found = targets_of(layout, GradientMode.FRESH, True, BF16)
    OURS.backward_dw(replace(pending), found)
    for name in ("dw1", "dw2"):
        assert torch.equal(found.sums(name), wanted[name].to(BF16)), (layout, name)
    return checked + 1


def targets_of(layout, mode, stacked, dtype):
    """Memory that holds ones where it is added to, and NaN where it is written."""
    fill = 1.0 if mode is GradientMode.MAIN_GRAD else float("nan")
    options = {"stacked": stacked, "fill": fill, "mode": mode, "dtype": dtype}
    return parameter_targets((E, 2 * I, H, I), layout, **options)


def adapters() -> int:
    """Low-rank ones, beside a gate and without one."""
    for activation, bias in ((ActivationType.SWIGLU_OAI, True), (ActivationType.GELU, False)):
        assert_adapted_close(make_case(activation, bias=bias), OURS)
    return 2


def no_rows() -> int:
    """No valid slot at all: zeros, and written gradients are zeros."""
    case = make_case(bias=False)
    case.indices.fill_(-1)
    got = run(case)
    assert all(bool((tensor == 0).all()) for tensor in got.values())
    written = targets_of(WeightLayout(), GradientMode.FRESH, True, torch.float32)
    run(case, targets=written)
    assert all(bool((tensor == 0).all()) for tensor in written.tensors())
    return 2


CHECKS = {
    check.__name__: check
    for check in (activations, tiles, modes, bad_tokens, targets, adapters, no_rows)
}

if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, CHECKS[check](), "checked")
