"""One rank: nothing travels, the contract stays."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ShapeError, expect
from ..interop import is_cuda
from .dispatcher import Dispatcher
from .interface import Dispatched, check_dispatch, zero_where_not_here

Tensor = torch.Tensor


class LocalDispatcher(Dispatcher):
    """The dispatcher of a group of one. A token whose slots are all dropped keeps its row, with
    every index -1.
    """

    name = "local"

    def __init__(self, num_experts: int) -> None:
        """All experts are local."""
        self.num_experts = self.num_local_experts = num_experts

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """See `Dispatcher.dispatch`; `handle` is the number of rows."""
        check_dispatch(x, topk_idx, topk_weights)
        indices = topk_idx.detach().to(torch.int64)
        if int(x.shape[0]) == 0:
            return Dispatched(x, [0] * self.num_experts, indices, topk_weights, 0)
        probs = zero_where_not_here(topk_weights, indices)
        # Counting waits for a GPU; the routing metadata then counts on the device.
        counts = None if is_cuda(indices) else count_experts(indices, self.num_experts).tolist()
        return Dispatched(x, counts, indices, probs, int(x.shape[0]))

    def combine(self, out: Tensor, handle: Any) -> Tensor:
        expect(
            int(out.shape[0]) == handle,
            ShapeError,
            f"out has shape {tuple(out.shape)}; the dispatch of this handle delivered {handle} rows: needed [{handle}, H]",
        )
        return out


def count_experts(indices: Tensor, num_experts: int) -> Tensor:
    """int64 `[num_experts]`: slots per expert; ids outside `[0, num_experts)` are not counted."""
    if 0 in tuple(indices.shape):
        return torch.zeros([num_experts], dtype=torch.int64, device=indices.device)
    flat = indices.reshape([-1])
    inside = (flat >= 0) & (flat < num_experts)
    return torch.bincount(
        torch.where(inside, flat, torch.full_like(flat, num_experts)), minlength=num_experts + 1
    )[:num_experts]
