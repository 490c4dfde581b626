"""Dispatch and combine as `paddle.autograd.PyLayer`s; `sonicmoe.node.bridge_paddle` lists the rules
they obey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle.autograd import PyLayer

if TYPE_CHECKING:
    from .dispatcher import DispatchCall, Route


class _Dispatch(PyLayer):  # type: ignore[misc]
    """Inputs: call, x, topk_weights."""

    @staticmethod
    def forward(ctx: Any, call: DispatchCall, x: Any, topk_weights: Any) -> tuple[Any, Any]:
        """`(x [R, H], probs [R, K])`."""
        outputs = call.run(x, topk_weights)
        ctx.route = call.route
        ctx.wanted = (not x.stop_gradient, not topk_weights.stop_gradient)
        return outputs

    @staticmethod
    def backward(ctx: Any, dx: Any, dprobs: Any) -> tuple[Any, Any]:
        """A combine of dx that carries dprobs."""
        gradients = ctx.route.dispatch_backward(dx, dprobs)
        x_gradient, weight_gradient = (
            g if wanted else None for g, wanted in zip(gradients, ctx.wanted, strict=True)
        )
        return x_gradient, weight_gradient


class _Combine(PyLayer):  # type: ignore[misc]
    """Inputs: route, out."""

    @staticmethod
    def forward(ctx: Any, route: Route, out: Any) -> Any:
        """`[R, H]` -> `[T, H]`."""
        ctx.route = route
        return route.combine(out)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        """A cached dispatch of dout."""
        return ctx.route.combine_backward(dout)


def dispatch(call: DispatchCall, x: Any, topk_weights: Any) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Run `call` under autograd."""
    return _Dispatch.apply(call, x, topk_weights)


def combine(route: Route, out: Any) -> paddle.Tensor:
    """Run the combine of `route` under autograd."""
    return _Combine.apply(route, out)
