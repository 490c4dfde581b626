"""Run under TRITON_INTERPRET=1: the Triton engine on the host against the reference engine.
`python -m kernels.triton_engine_interpreted CHECK...`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernels.triton_interpreter import repair

repair()

from engine.fp8_layer import PLAIN, Case, assert_same_bits  # noqa: E402
from oracle.case import drawn  # noqa: E402
from oracle.engines import broken_on_host, chosen_on_host  # noqa: E402
from oracle.faces import ON_HOST, normal  # noqa: E402

from sonicmoe.engine import plain_engine  # noqa: E402
from sonicmoe.engine import triton as triton_engine  # noqa: E402
from sonicmoe.engine.gpu import Gpu  # noqa: E402
from sonicmoe.engine.interface import GradientMode  # noqa: E402
from sonicmoe.engine.triton import TritonEngine  # noqa: E402
from sonicmoe.layouts import WeightLayout  # noqa: E402

OURS = TritonEngine()
CASE = Case(150, 72, 40)  # no tile divides these
# Plain GEMMs add an adapter's part to z that is rounded, which passes a clamp now and then.
BARS = {"none": {"db1": 8e-3, "else": 4e-3}, "beside": {"else": 2.0}}


def cases() -> int:
    """Some of tests/oracle's, of few numbers, because the interpreter takes seconds for each."""
    chosen_on_host(pytest.MonkeyPatch())
    found = [
        replace(case, law="repeat", scene="usual", sizes=(21, 72, 40, 3, 1))
        for case in drawn(9, 2, partial(normal, engine="triton" + ON_HOST))
    ]
    wrong = {
        str(case): broken_on_host(case, "triton", BARS.get(case.adapters, BARS["beside"]))
        for case in found
    }
    wrong = {case: words for case, words in wrong.items() if words}
    assert not wrong, wrong
    return len(found)


def tiles() -> int:
    """Those of the other architectures, and a part of the GPU."""
    wanted = CASE.run(OURS)
    with_gpu("sm_90a", 1)
    other = CASE.run(OURS)
    assert all(torch.allclose(other[n], wanted[n], rtol=0.02, atol=0.02) for n in wanted)
    with_gpu("sm_80", 8)
    assert_same_bits(CASE.run(OURS, replace(PLAIN, gemm_num_sms=3)), wanted)
    with_gpu("sm_80", 1)
    return 2


def with_gpu(arch, multiprocessors):
    """The interpreter runs the kernels of this GPU where the tensors are."""
    triton_engine.gpu_of = lambda device: Gpu(arch, multiprocessors)


def targets() -> int:
    """Weight gradients in every layout: added to stacked and single matrices, and written."""
    wanted, pending, checked = CASE.run(OURS), CASE.pending(OURS), 0
    for number in range(8):
        layout = WeightLayout(transposed=bool(number & 1), split_half=bool(number & 2))
        stacked = bool(number & 4)
        for mode, dtype in (
            (GradientMode.MAIN_GRAD, torch.float32),
            (GradientMode.FRESH, torch.bfloat16 if stacked else torch.float32),
        ):
            found = targets_of(layout, mode, stacked, dtype)
            if mode is GradientMode.MAIN_GRAD:
                assert OURS.problem_of(found, PLAIN) is None
            OURS.backward_dw(replace(pending), found)  # which releases the copy's operands
            for name in ("dw1", "dw2"):
                sums = wanted[name] + (1.0 if mode is GradientMode.MAIN_GRAD else 0.0)
                assert torch.equal(found.sums(name), sums.to(dtype)), (layout, stacked, name)
            checked += 1
    layout = WeightLayout(split_half=True, apart=True)
    found = targets_of(layout, GradientMode.FRESH, True, torch.bfloat16)
    OURS.backward_dw(replace(pending), found)
    for name in ("dw1", "dw2"):
        assert torch.equal(found.sums(name), wanted[name].to(torch.bfloat16)), (layout, name)
    return checked + 1


def targets_of(layout, mode, stacked, dtype):
    """Memory that holds ones where it is added to, and NaN where it is written."""
    fill = 1.0 if mode is GradientMode.MAIN_GRAD else float("nan")
    options = {"stacked": stacked, "fill": fill, "mode": mode, "dtype": dtype}
    return CASE.targets(layout, **options)


CHECKS = {check.__name__: check for check in (cases, tiles, targets)}

if __name__ == "__main__":
    plain_engine.is_cuda = lambda weight: True
    triton_engine._launch_scope = lambda tensor: nullcontext()
    with_gpu("sm_80", 1)
    for check in sys.argv[1:]:
        print(check, CHECKS[check](), "checked")
