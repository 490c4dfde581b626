"""Causal attention by PyTorch's fused kernels, with gradients that are the same bits every time. A
leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

Tensor = torch.Tensor


def repeatable_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`softmax(q k^T / sqrt(D) + causal mask) v`: `[B, N, S, D]` three times -> `[B, N, S, D]`, one
    dtype.
    """
    return _RepeatableAttention.apply(q, k, v)  # type: ignore[no-any-return]


class _RepeatableAttention(torch.autograd.Function):
    """The fused backward adds dq with atomics unless PyTorch's deterministic mode is on.

    That mode holds for the whole process, so it is switched on only while these kernels are chosen
    and launched. Backward runs the cheap forward once more, because each kernel saves its own kind
    of private state between the two passes, and this class cannot name it.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        with _deterministic_kernels():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (operand.detach().requires_grad_() for operand in ctx.saved_tensors)
        with torch.enable_grad(), _deterministic_kernels():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), dout)


@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # The mode also fills every new tensor, a pass over its memory. Leave that to callers who had
    # switched the mode on themselves.
    memory.fill_uninitialized_memory = filled and before[0]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
