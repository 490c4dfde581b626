"""Fused attention: the numbers of plain products, the same bits again, and a deterministic mode
that is on for its kernels alone.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ernie_compat import torch_attention
from ernie_compat.torch_attention import repeatable_attention

B, N, S, D = 2, 3, 40, 16


def operands(dtype):
    """q, k, v as slices of one projection, with the strides that the model's have, and a gradient
    for the result.
    """
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(3, B, S, N, D, generator=generator).transpose(2, 3)
    dout = torch.randn(B, S, N, D, generator=generator).transpose(1, 2)
    return [tensor.to(dtype).requires_grad_() for tensor in qkv] + [dout.to(dtype)]


def plain(q, k, v):
    mask = torch.full((S, S), -torch.inf, dtype=q.dtype).triu(1)
    return torch.softmax(q @ k.transpose(-2, -1) * D**-0.5 + mask, dim=-1) @ v


def results(attend, dtype):
    q, k, v, dout = operands(dtype)
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_result_and_gradients_are_those_of_plain_products(dtype, bound):
    for ours, exact in zip(
        results(repeatable_attention, dtype), results(plain, torch.float64), strict=True
    ):
        assert ours.dtype == dtype and ours.shape == (B, N, S, D)
        assert float((ours.double() - exact).norm() / exact.norm()) < bound


def test_equal_calls_give_equal_bits():
    first, second = (results(repeatable_attention, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("before", "filled"), [((False, False), True), ((True, True), True), ((True, False), False)]
)
def test_the_deterministic_mode_is_the_callers_again(before, filled, monkeypatch):
    seen, fused, memory = [], F.scaled_dot_product_attention, torch.utils.deterministic

    def mode():
        enabled = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return enabled, warns, memory.fill_uninitialized_memory

    def watched(*arguments, **options):
        seen.append(mode())
        return fused(*arguments, **options)

    monkeypatch.setattr(torch_attention.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(memory, "fill_uninitialized_memory", filled)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        results(repeatable_attention, torch.bfloat16)
        assert mode() == (*before, filled)
    finally:
        torch.use_deterministic_algorithms(False)
    # Not merely a warning: the kernels read that as permission. Nobody pays for filled memory who
    # did not ask for it.
    assert seen == [(True, False, filled and before[0])] * 2
