"""Per-token gather-and-sum on the GPU against plain tensor operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu.device import captured, waiting_is_an_error
from kernels.routing_cases import check_sums, distinct_probs, sentinels, summed_by, topk_of

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.routing import backends
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module", params=["cuda", "triton"])
def kernels(request):
    if request.param == "triton":
        return backends.TritonKernels()
    return backends.CudaKernels(backends.arch_of("cuda:0"))


def routing_of(tokens, topk, global_experts, experts, seed=0):
    indices = sentinels(topk_of(tokens, topk, global_experts, seed), experts, seed % 3)
    return build_routing(indices.cuda(), distinct_probs(indices, experts).cuda(), experts)


def outputs_of(dtype):
    return DTYPES if dtype == torch.float32 else [dtype, torch.float32]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_plain_operations(kernels, dtype, weighted):
    with memory_full_of_nan("cuda"):
        for seed, (tokens, topk, global_experts) in enumerate(
            [(1, 1, 4), (257, 8, 16), (100, 32, 40), (64, 33, 48), (500, 8, 256)]
        ):
            routing = routing_of(tokens, topk, global_experts, min(16, global_experts), seed)
            for width in (1, 7, 8, 20, 256, 768, 1000, 2048, 3072, 4104):
                for out in outputs_of(dtype) if width in (20, 3072) else [dtype]:
                    check_sums(kernels, routing, width, dtype, weighted, out)


def test_tokens_without_rows_are_exact_zeros(kernels):
    indices = torch.full((300, 4), -1, device="cuda")
    routing = build_routing(indices, torch.full((300, 4), float("nan"), device="cuda"), 4)
    rows = torch.full((routing.num_rows, 512), float("nan"), device="cuda")
    out = summed_by(kernels, rows, routing, weighted=True)
    assert out.shape == (300, 512)
    assert bool((out == 0).all())


@pytest.mark.large
def test_rows_past_two_to_the_31_elements(kernels):
    tokens, width = 900_000, 2560
    indices = torch.arange(tokens, device="cuda").remainder(2).reshape(-1, 1)
    probs, half = torch.ones((tokens, 1), device="cuda"), tokens // 2
    routing = build_routing(indices, probs, 2, [half, half])
    assert routing.num_rows * width > 2**31
    rows = torch.randint(-9, 9, (routing.num_rows, 1), device="cuda").to(torch.bfloat16)
    rows = rows.expand(-1, width).contiguous()
    out = summed_by(kernels, rows, routing, weighted=False)
    assert torch.equal(out[:, 0], rows[routing.slot_row[:, 0], 0])
    assert torch.equal(out[-1], rows[routing.slot_row[-1, 0]])
    assert torch.equal(out[:, -1], out[:, 0])


def test_graph_and_no_sync(kernels):
    routing = routing_of(2048, 8, 16, 16)
    rows = torch.randn((routing.num_rows, 1024), device="cuda").to(torch.bfloat16)
    want = summed_by(kernels, rows, routing, weighted=True).clone()
    with waiting_is_an_error():
        graph, out = captured(lambda: summed_by(kernels, rows, routing, weighted=True))
    graph.replay()
    assert torch.equal(out, want)
