"""The gradient flush in one launch against plain tensor operations: equal bits in every layout,
dtype and kind of destination.
"""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.interface import GradientTargets
from sonicmoe.gradients.flush import flush_table
from sonicmoe.interop import current_stream, dtype_name
from sonicmoe.kernels.cuda_wgrad import flush_source
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (E, H, I): whole tiles, tails in both directions, nothing in fours, single elements, the widths of
# public models
SIZES = [(3, 128, 64), (2, 200, 72), (3, 66, 35), (2, 1, 1), (2, 2880, 768)]


@pytest.fixture(scope="module")
def kernel():
    return flush_source("sm_90a").load()


def in_fresh_memory(gradient):
    """Whatever the layout: the flush zeroes the accumulators, which the expected values must outlive."""
    return gradient.clone(memory_format=torch.contiguous_format)


def held_before(shape, dtype, offset):
    """A tensor with values that starts `offset` elements behind an aligned address."""
    size = int(torch.Size(shape).numel())
    return torch.randn(size + offset, device="cuda").to(dtype)[offset:].view(shape)


@pytest.mark.parametrize(
    ("dtype", "offset", "transposed", "split_half", "fresh"),
    pairwise(DTYPES, [0, 1, 2], *[[False, True]] * 3),
)
def test_every_layout(kernel, dtype, transposed, split_half, fresh, offset):
    layout = WeightLayout(transposed, split_half)
    for experts, hidden, intermediate in SIZES:
        dw1 = torch.randn((experts, 2 * intermediate, hidden), device="cuda")
        dw2 = torch.randn((experts, hidden, intermediate), device="cuda")
        user = layout.user_w1(dw1), layout.user_w2(dw2)
        wanted = [gradient for both in map(in_fresh_memory, user) for gradient in both]
        targets = [held_before(gradient.shape, dtype, offset) for gradient in wanted]
        wanted = [
            g.to(dtype) if fresh else (t.float() + g).to(dtype)
            for t, g in zip(targets, wanted, strict=True)
        ]
        targets[1] = None  # frozen
        code = kernel.gradient_format(dtype_name(dtype), fresh)
        table = [word for t in targets for word in ((0, 0) if t is None else (t.data_ptr(), code))]
        kernel.flush_gradients(dw1, dw2, table, transposed, split_half, current_stream(dw1))
        for index, (got, want) in enumerate(zip(targets, wanted, strict=True)):
            assert got is None or torch.equal(got, want), (experts, hidden, intermediate, index)
        assert not dw1.any() and not dw2.any()


@pytest.mark.large
def test_past_two_to_the_31_elements(kernel):
    experts, n1, hidden = 200, 4096, 2688
    assert experts * n1 * hidden > 2**31
    dw1 = torch.randn((experts, n1, hidden), device="cuda")
    dw2 = torch.zeros((experts, hidden, 4), device="cuda")
    layout = WeightLayout(transposed=True, split_half=True)
    want = {e: in_fresh_memory(layout.user_w1(dw1[e])) for e in (0, 191, 192, 199)}
    target, small = (
        torch.ones((experts, hidden, n1), device="cuda"),
        torch.zeros((experts, 4, hidden), device="cuda"),
    )
    into = GradientTargets(*(GradientPlaces.stacked(t, experts, layout) for t in (target, small)))
    table = flush_table(kernel, into, [False, False])
    kernel.flush_gradients(dw1, dw2, table, True, True, current_stream(dw1))
    for expert, gradient in want.items():
        assert torch.equal(target[expert], 1 + gradient), expert
    assert not dw1.any()
