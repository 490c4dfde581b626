"""One rank: nothing travels, the contract stays."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ShapeError, expect
from ..interop import is_cuda
from ..routing.ids import count_experts, in_one_spelling
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
        indices = in_one_spelling(topk_idx.detach().to(torch.int64), self.num_experts)
        # Without tokens the counts are known on any device, and there is nothing to select.
        if int(x.shape[0]) == 0:
            return Dispatched(x, [0] * self.num_experts, indices, topk_weights, 0)
        probs = zero_where_not_here(topk_weights, indices, self.num_experts)
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
