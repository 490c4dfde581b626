"""Weight gradients in memory of the parameters that lies in ways that tests/oracle does not have, and how a
kernel adds to it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu.hopper_step import FP8, layer
from gpu.kernel_checks import added_to
from node.direct_layers import assert_same_bits

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.interface import GradientTargets
from sonicmoe.enums import ActivationType
from sonicmoe.gradients.flush import flush_table
from sonicmoe.interop import current_stream
from sonicmoe.kernels.cuda_wgrad import flush_source
from sonicmoe.kernels.sm90 import bf16_sources, fp8_wgrad_source
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu
BF16 = SonicMoEConfig(fp8_mode="off", engine="bf16")


@pytest.mark.parametrize("offset", [8, 1], ids=["aligned", "odd addresses"])
@pytest.mark.parametrize("flush", ["auto", "step"])
@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_slices_of_a_communication_buffer(config, flush, offset):
    """Up and down of an expert side by side, strangers between them, and some parameters frozen: the bits
    of memory of their own, and no stranger is touched.
    """
    own, made = (layer(config, flush=flush, tokens=300) for _ in range(2))
    half, weights = len(made.weights) // 2, made.weights
    pairs = [pair for both in zip(weights[:half], weights[half:], strict=True) for pair in both]
    size = sum(weight.numel() + 16 for weight in pairs)
    buffer = torch.zeros(size + offset, device="cuda")
    strangers, place = torch.ones_like(buffer, dtype=torch.bool), offset
    for weight in pairs:
        mine = slice(place, place + weight.numel())
        weight.main_grad, strangers[mine] = buffer[mine].view(weight.shape), False
        place += weight.numel() + 16
    for other in (own, made):
        for weight in other.weights[1::3]:
            weight.requires_grad_(False)
    assert_same_bits(made.step(0, 1), own.step(0, 1))
    assert not buffer[strangers].any() and buffer.any()
    assert not any(weight.main_grad.any() for weight in weights[1::3])


ROWS = 1408  # of one expert: too many for its sums to be fetched, unless others have none


def fp8_addition(sums, offsets):
    codes = [
        torch.randint(0, 0x70, (size, ROWS), dtype=torch.uint8, device="cuda")
        for size in (256, 272)
    ]
    scales = [torch.rand((-(-len(c) // 128), ROWS // 128), device="cuda") for c in codes]
    left, right = zip(codes, scales, strict=True)
    module = fp8_wgrad_source("sm_90a").load()
    to = added_to(module, sums)
    return lambda: module.grouped_wgrad(*left, *right, offsets, to, 0, current_stream(sums))


def bf16_addition(sums, offsets, tokens_first=False):
    module = bf16_sources("sm_90a", ActivationType.SWIGLU)["bf16_wgrad"].load()
    _, m, n = sums.shape
    to = added_to(module, sums)
    width, hidden = (n, m) if tokens_first else (m, n)
    tokens, rows = (torch.randn(ROWS, c, device="cuda").bfloat16() for c in (hidden, width))
    row_token = torch.arange(ROWS, dtype=torch.int32, device="cuda")
    counts = (offsets[1:] - offsets[:-1]).int()
    given = tokens, rows, tokens_first, row_token, offsets, counts, to, 0, current_stream(sums)
    return lambda: module.wgrad(*given)


@pytest.mark.parametrize(
    "addition", [fp8_addition, bf16_addition, partial(bf16_addition, tokens_first=True)]
)
def test_fetched_sums_have_the_bits_of_the_copy_engines(addition):
    """Beside seven empty experts, experts have few rows on average."""
    before = torch.randn((8, 256, 272), device="cuda")
    before[0, 0, :8] = torch.tensor([1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, 0, -0.0, 1])
    every = []
    for experts in (1, 8):
        torch.manual_seed(0)
        sums = before[:experts].clone()
        offsets = torch.tensor([0, *[ROWS] * experts], device="cuda")
        add = addition(sums, offsets)
        add()
        add()
        every.append(sums)
    assert torch.equal(every[0][0].view(torch.int32), every[1][0].view(torch.int32))
    assert torch.equal(every[1][1:], before[1:]) and not torch.equal(every[0][0], before[0])


@pytest.mark.large
def test_a_flush_past_two_to_the_31_elements():
    kernel = flush_source("sm_90a").load()
    experts, n1, hidden = 200, 4096, 2688
    assert experts * n1 * hidden > 2**31
    dw1 = torch.randn((experts, n1, hidden), device="cuda")
    dw2 = torch.zeros((experts, hidden, 4), device="cuda")
    layout = WeightLayout(transposed=True, split_half=True)
    want = {e: layout.user_w1(dw1[e]).clone() for e in (0, 191, 192, 199)}
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
