"""The products of another processor differ from this one's in the last bits, and in nothing else."""

from __future__ import annotations

import pytest
import torch
from framework import IS_PADDLE
from other_products import OtherProducts

pytestmark = pytest.mark.skipif(IS_PADDLE, reason="replaces PyTorch's products")


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((3, 64, 96), (80, 96))
    )
    bias = torch.ones(80, dtype=dtype, requires_grad=True)
    out = torch.nn.functional.linear(x, weight, bias) @ torch.ones(3, 80, 7, dtype=dtype)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weight, bias))]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-8)])
def test_last_bits_differ_forward_and_backward(dtype: torch.dtype, unit: float) -> None:
    ours = gradients(dtype)
    with OtherProducts() as mode:
        theirs, again = gradients(dtype), gradients(dtype)
    assert mode.seen == 2 * 5, "two products forward, three backward"
    assert all(torch.equal(a, b) for a, b in zip(theirs, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b.double()).norm() / a.double().norm()) < 4 * unit
