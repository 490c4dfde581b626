"""One rank: nothing travels, the contract stays."""

from __future__ import annotations

import torch

from ..interop import is_cuda
from ..routing.ids import count_experts
from .dispatcher import Route, TransportDispatcher
from .fp8_rows import Forms, SentGradient
from .interface import Dispatched, Received, Tokens, Transport, zero_where_not_here

Tensor = torch.Tensor


class LocalTransport(Transport):
    """`Transport` of a group of one. A token whose slots are all dropped keeps its row, with every
    index -1. Its handles are None, because there are no routes.
    """

    name = "local"
    exact_rows = False
    moves = False

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts, world_size=1, rank=0)

    def dispatch(self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor) -> Received:
        counts = None
        # Counting waits for a GPU; the routing metadata then counts on the device. Without tokens
        # the counts are known on any device.
        if int(topk_idx.shape[0]) == 0:
            counts = [0] * self.num_experts
        elif not is_cuda(topk_idx):
            counts = count_experts(topk_idx, self.num_experts).tolist()
        return Received(x, topk_idx, topk_weights, counts, None)

    def dispatch_cached(self, x: Tokens, handle: None) -> Tokens:
        return x

    def combine(
        self, x: Tensor, handle: None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        # A copy in the forward: an operation that returns its input is none to autograd, and
        # callers may write to the result in place, which a view would forbid.
        return (x.clone() if weights is None else x), weights


class LocalDispatcher(TransportDispatcher):
    """The dispatcher of one rank without a group, or in a group of one."""

    def __init__(
        self, num_experts: int, fp8: bool | str = False, fp8_grad: bool | str = False
    ) -> None:
        """All experts are local. fp8, fp8_grad: quantise tokens and gradients where a dispatch does
        not say otherwise.
        """
        super().__init__(LocalTransport(num_experts), fp8, fp8_grad)

    def _send(self, x: Tensor, ids: Tensor, topk_weights: Tensor, forms: Forms) -> Dispatched:
        """Tokens that are not quantised are the caller's tensor itself, whose gradient autograd
        knows.
        """
        if forms.tokens:
            return super()._send(x, ids, topk_weights, forms)
        counts = self.transport.dispatch(x, ids, topk_weights).tokens_per_expert
        probs = zero_where_not_here(topk_weights, ids, self.num_experts)
        route = Route(self.transport, None, ids, ids, SentGradient.of(forms))
        return Dispatched(x, counts, ids, probs, route, dout_source=route.gradient)
