"""Dispatch and combine as `torch.autograd.Function`s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .dispatcher import DispatchCall, Route

Tensor = torch.Tensor


class _Dispatch(torch.autograd.Function):
    """Inputs: call, x, topk_weights. Gradients that did not arrive count as zeros: the collective
    runs on every rank or on none.
    """

    @staticmethod
    def forward(
        ctx: Any, call: DispatchCall, x: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`(x [R, H], probs [R, K])`."""
        outputs = call.run(x, topk_weights)
        ctx.route = call.route
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: Tensor, dprobs: Tensor) -> tuple[Tensor | None, ...]:
        """A combine of dx that carries dprobs."""
        x_gradient, weight_gradient = ctx.route.dispatch_backward(dx, dprobs)
        _, x_wanted, weights_wanted = ctx.needs_input_grad
        return None, x_gradient if x_wanted else None, weight_gradient if weights_wanted else None


class _Combine(torch.autograd.Function):
    """Inputs: route, out."""

    @staticmethod
    def forward(ctx: Any, route: Route, out: Tensor) -> Tensor:
        """`[R, H]` -> `[T, H]`."""
        ctx.route = route
        return route.combine(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        """A cached dispatch of dout."""
        return None, ctx.route.combine_backward(dout)


def dispatch(call: DispatchCall, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Run `call` under autograd."""
    return _Dispatch.apply(call, x, topk_weights)  # type: ignore[no-any-return]


def combine(route: Route, out: Tensor) -> Tensor:
    """Run the combine of `route` under autograd."""
    return _Combine.apply(route, out)  # type: ignore[no-any-return]
