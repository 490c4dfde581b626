"""The differentiable dispatcher over any transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ShapeError, expect
from ..interop import IS_PADDLE, grad_enabled, plain_ops, require_framework_tensor, requires_grad
from .interface import Dispatched, Received, Transport, check_dispatch, zero_where_not_here

if IS_PADDLE:
    from . import bridge_paddle as bridge
else:
    from . import bridge_torch as bridge  # type: ignore[no-redef]

Tensor = torch.Tensor


class Dispatcher(ABC):
    """Tokens to their experts and back. Both calls, and their backwards, are collectives: every
    rank makes them, in one order.
    """

    num_experts: int
    num_local_experts: int
    name: str

    @abstractmethod
    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """Send every token to the ranks of its experts.

        Args:
            x: `[T, H]`; T may differ between ranks and be 0.
            topk_idx: int64 or int32 `[T, K]`, global expert ids, distinct within a row; -1 drops
                the slot.
            topk_weights: fp32 `[T, K]`.

        Gradients of x and topk_weights flow; that of a weight is exactly 0 where its slot is
        dropped.

        Raises:
            DTypeError, ShapeError, DeviceError: naming the argument, what came and what is needed.
        """

    @abstractmethod
    def combine(self, out: Tensor, handle: Any) -> Tensor:
        """Sum the rows `[R, H]` of one dispatch over ranks, unweighted, back into source order:
        `[T, H]` in out's dtype.

        Raises:
            ShapeError: `out` has another number of rows than the dispatch delivered.
        """


@dataclass(frozen=True, eq=False)
class Route:
    """One dispatch's way there and back.

    topk_idx int64 `[T, K]` as sent, indices int64 `[R, K]` as received: the masks of dropped and
    foreign slots.
    """

    transport: Transport
    handle: Any
    topk_idx: Tensor
    indices: Tensor

    def dispatch_backward(self, dx: Tensor, dprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the received rows -> gradients of `x [T, H]` and `topk_weights [T, K]`."""
        weights = zero_where_not_here(dprobs.to(torch.float32), self.indices)
        combined, dweights = self.transport.combine(
            dx.contiguous(), self.handle, weights.contiguous()
        )
        assert dweights is not None
        return combined, zero_where_not_here(dweights, self.topk_idx)

    def combine(self, out: Tensor) -> Tensor:
        return self.transport.combine(out.contiguous(), self.handle)[0]

    def combine_backward(self, dout: Tensor) -> Tensor:
        """`[T, H]` -> `[R, H]`; rows beyond the real ones are exact zeros."""
        rows = self.transport.dispatch_cached(dout.contiguous(), self.handle)
        if self.transport.exact_rows:
            return rows
        here = (self.indices >= 0).to(torch.int32).sum(1) > 0
        return torch.where(here.reshape([-1, 1]), rows, torch.zeros_like(rows))


class DispatchCall:
    """One dispatch: run inside the autograd bridge, its route kept for backward."""

    def __init__(self, transport: Transport, topk_idx: Tensor) -> None:
        """`topk_idx` is no differentiable input; it travels here."""
        self.transport, self.topk_idx = transport, topk_idx
        self.received: Received | None = None
        self.route: Route | None = None

    def run(self, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """`(x [R, H], probs [R, K])`."""
        with plain_ops():
            received = self.transport.dispatch(
                x.detach().contiguous(), self.topk_idx, topk_weights.detach().contiguous()
            )
            probs = zero_where_not_here(received.topk_weights, received.topk_idx)
        self.received = received
        self.route = Route(self.transport, received.handle, self.topk_idx, received.topk_idx)
        return received.x, probs


class TransportDispatcher(Dispatcher):
    """DeepEP's algebra over a `Transport`."""

    def __init__(self, transport: Transport) -> None:
        """Stateless but for the transport."""
        self.transport = transport
        self.num_experts, self.num_local_experts = (
            transport.num_experts,
            transport.num_local_experts,
        )
        self.name = transport.name

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        check_dispatch(x, topk_idx, topk_weights)
        call = DispatchCall(self.transport, topk_idx.detach().to(torch.int64).contiguous())
        if grad_enabled() and (requires_grad(x) or requires_grad(topk_weights)):
            recv_x, probs = bridge.dispatch(call, x, topk_weights)
        else:
            recv_x, probs = call.run(x, topk_weights)
        assert call.received is not None
        return Dispatched(
            recv_x, call.received.tokens_per_expert, call.received.topk_idx, probs, call.route
        )

    def combine(self, out: Tensor, handle: Route) -> Tensor:
        require_framework_tensor(out, "out")
        rows = int(handle.indices.shape[0])
        expect(
            len(out.shape) == 2 and int(out.shape[0]) == rows,
            ShapeError,
            f"out has shape {tuple(out.shape)}; the dispatch of this handle delivered {rows} rows: needed [{rows}, H]",
        )
        if grad_enabled() and requires_grad(out):
            return bridge.combine(handle, out)
        with plain_ops():
            return handle.combine(out.detach())
