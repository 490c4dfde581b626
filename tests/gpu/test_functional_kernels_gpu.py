"""The functional API on Hopper: which kernels a layer runs in every layout, so that no copy of a weight
or a gradient slips in; and that z's memory is reused without another bit.
"""

from __future__ import annotations

import pytest
import torch
from gpu.engine_cases import ARCH, SWIGLU, build, make_case
from kernels.quantiser_checks import APART, LAYOUTS

from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.cuda_wgrad import expert_rows_source
from sonicmoe.kernels.sm90 import bf16_sources, engine_sources
from sonicmoe.layouts import GateUp

pytestmark = pytest.mark.gpu

OF_EVERY_LAYER = {"build_metadata", "aggregate_rows", "sum_or_zero"}
GEMMS = {"bf16_grouped_gemm", "bf16_wgrad"}
GEMMS_FP8 = {"fp8_grouped_gemm", "fp8_wgrad"}
# Of weights, whose writes are looked for first; of tokens by rows, and transposed for wgrad.
QUANTISERS = {"quantize_tiles", "compare_stretches", "quantize_row_blocks", "transpose_tiles"}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    own = [*engine_sources(ARCH, SWIGLU), *bf16_sources(ARCH, SWIGLU).values()]
    build([*cuda_sources(ARCH), expert_rows_source(ARCH), *own])


def layer(layout, use_fp8, hidden=512, intermediate=384):
    """A call of the layer, and its leaves."""
    case = make_case(900, hidden=hidden, intermediate=intermediate, experts=6, topk=3)
    w1, w2 = layout.user_w1(case.weights[0]), layout.user_w2(case.weights[1])
    parts = [*w1.flip(0)] if layout.apart else [w1]  # the up half first, so that it lies below
    leaves = [t.detach().clone().requires_grad_() for t in (case.x, case.probs, *parts, w2)]

    def call():
        x, probs, *own, w2 = leaves
        w1 = GateUp(*reversed(own)) if layout.apart else own[0]
        given = (x, case.indices, probs, w1, w2, None, None, SWIGLU)
        return expert_mlp(*given, layout=layout, use_fp8=use_fp8)

    return call, leaves, case.dout


@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layout", [*LAYOUTS, APART], ids=str)
def test_a_layer_runs_its_gemms_and_nothing_that_copies(layout, use_fp8):
    call, leaves, dout = layer(layout, use_fp8)
    torch.autograd.grad(call(), leaves, dout)
    torch.autograd.graph.increment_version(leaves[2:])  # new weights
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        torch.autograd.grad(call(), leaves, dout)
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    names = {event.name for event in profiler.events() if event.device_type == on_gpu}
    wanted = OF_EVERY_LAYER | (GEMMS_FP8 | QUANTISERS if use_fp8 else GEMMS)
    others = {name for name in names if not any(known in name for known in wanted)}
    assert not others
    assert all(any(known in name for name in names) for known in wanted - QUANTISERS)
