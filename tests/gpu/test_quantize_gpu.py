"""The GPU quantisers against the reference, bit for bit: what every place of their kernels is asked, and
sizes of models, tensors past 2^31 elements, and CUDA graphs.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import captured
from kernels.quantiser_checks import (
    HALVES,
    TestRows,  # noqa: F401
    TestWeights,  # noqa: F401
    assert_same,
    check,
    scribble,
    untouched,
    user_weights,
    values,
)
from kernels.quantiser_checks import TestGuard as Guard

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.quant import gpu
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize, transpose_storage
from sonicmoe.weight_source import WeightSource

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device():
    with memory_full_of_nan("cuda"):
        yield "cuda"


def test_sizes_of_a_model(device):
    """The sizes of GPT-OSS are no multiples of 128."""
    source = user_weights((2, 2880, 2880), torch.bfloat16, HALVES, 0, device)
    weights = gpu.QuantizedWeights()
    weights.update(source)
    check(weights, source)
    x = values((1000, 2880), torch.bfloat16, 1, device)
    assert_same(gpu.quantize_rows(x), quantize(x, rows(128)))


@pytest.mark.parametrize("columns", [3072, 3088], ids=["whole blocks", "partial blocks"])
@pytest.mark.large
def test_rows_past_two_to_the_31_elements(device, columns):
    repeats, tokens = 700, 1024
    pattern = values((tokens, columns), torch.bfloat16, 0, device)
    x = pattern.repeat(repeats, 1)
    assert x.numel() > 2**31
    q, wanted = gpu.quantize_rows(x), quantize(pattern, rows(128))
    assert bool((q.bytes.view(repeats, tokens, -1) == wanted.bytes).all())
    scales = q.scale_inv.view(torch.int32).view(repeats, tokens, -1)
    assert bool((scales == wanted.scale_inv.view(torch.int32)).all())


@pytest.mark.large
def test_weights_past_two_to_the_31_elements(device):
    experts, hidden, inner = 17, 8192, 8192
    shapes = (experts, hidden, 2 * inner), (experts, inner, hidden)
    up, down = (
        torch.randint(-127, 127, shape, dtype=torch.int8, device=device).to(torch.bfloat16)
        for shape in shapes
    )
    assert up.numel() > 2**31
    weights = gpu.QuantizedWeights()
    weights.update(WeightSource(tuple(up), tuple(down), HALVES))
    for e in (0, 1, experts - 1):
        one = WeightSource((up[e],), (down[e],), HALVES)
        for native, block, forward, dgrad in zip(
            one.native()[:2],
            (gpu.W1_BLOCK, gpu.W2_BLOCK),
            (weights.w1, weights.w2),
            (weights.w1_dgrad, weights.w2_dgrad),
            strict=True,
        ):
            wanted = quantize(native[0], block)
            assert_same(forward[e], wanted, e)
            assert_same(dgrad[e], transpose_storage(wanted), e)


class TestGuard(Guard):
    @pytest.mark.parametrize("source", [(torch.bfloat16, HALVES)], indirect=True, ids=str)
    def test_moved_weights_are_refused_in_a_capture(self, source, weights):
        """And quantised outside, even to equal bytes: the old address may belong to somebody else."""
        moved = WeightSource(source.up, (*source.down[:-1], source.down[-1].clone()), source.layout)
        with pytest.raises(Exception, match="have moved within a CUDA graph capture"):
            captured(lambda: weights.update(moved))
        weights.update(moved)
        check(weights, moved)

    def test_graph_follows_weight_updates(self, source, weights):
        graph, _ = captured(lambda: weights.update(source))
        for _ in range(3):
            scribble(weights)
            graph.replay()
            assert untouched(weights)
            for matrix in (*source.up, *source.down):
                matrix.mul_(-0.7)
            graph.replay()
            check(weights, source)
