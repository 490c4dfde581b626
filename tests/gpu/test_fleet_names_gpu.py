"""What PaddleFleet calls beside `run_sonic_moe`, on the GPU: the metadata tuple and the layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fleet.naive_metadata import by_definition, drawn

from sonicmoe.fleet.twin import deepep_topk_to_sonic_metadata
from sonicmoe.fleet.weight_layout import (
    fused_grouped_w1_to_sonic,
    fused_sonic_w1_to_grouped,
    fused_transpose_w2_layout,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", [1, 128])
@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 1, 1), (37, 4, 6), (200, 8, 16)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_the_tuple_is_as_defined_whatever_is_known_of_the_counts(block, shape, share):
    tokens, topk, experts = shape
    indices, probs = drawn(tokens, topk, experts, seed=tokens, share=share)
    counts = [int((indices == e).sum()) for e in range(experts)]
    wanted = by_definition(indices, probs, experts, block)
    on_gpu = torch.tensor(indices).cuda(), torch.tensor(probs).cuda()
    for given in (counts, torch.tensor(counts, dtype=torch.int32).cuda(), None):
        found = deepep_topk_to_sonic_metadata(*on_gpu, given, experts, "cuda", block)
        for element, value in zip(found, wanted, strict=True):
            if isinstance(element, torch.Tensor):
                assert element.is_cuda and element.shape == (len(value),)
                assert np.array_equal(element.cpu().double().numpy(), np.asarray(value, np.float64))
            else:
                assert element == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_layouts_have_the_bits_of_the_host_and_take_one_copy(dtype):
    weight = (torch.arange(8 * 256 * 512) % 251).reshape(8, 256, 512).float().to(dtype)
    there = weight.cuda()
    for move in (fused_grouped_w1_to_sonic, fused_sonic_w1_to_grouped, fused_transpose_w2_layout):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        moved = move(there)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak == moved.numel() * moved.element_size()
        assert torch.equal(moved.cpu().view(torch.uint8), move(weight).view(torch.uint8))
