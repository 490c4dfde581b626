"""The node's call as a `paddle.autograd.PyLayer`.

Rules of PyLayer that shape this page: backward returns one gradient per *tensor* argument; None for
a non-leaf input that wants a gradient crashes the process, a gradient for a `stop_gradient` input
raises; None for a leaf parameter is fine and still fires its hooks, once per backward; a second
backward through one PyLayer crashes the process (Paddle 3.3); `saved_tensor` is a method, and only
what went through `save_for_backward` takes part in recompute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer

from .mlp_call import MlpCall


class _MlpPyLayer(PyLayer):  # type: ignore[misc]
    """Inputs: call, x, probs, then every expert parameter."""

    @staticmethod
    def forward(ctx: Any, call: MlpCall, x: Any, probs: Any, *parameters: Any) -> Any:
        """Run the call; keep tensors through `save_for_backward` only."""
        out, saved = call.forward(x, probs, save=True)
        assert saved is not None
        ctx.call = call
        ctx.wanted = (not x.stop_gradient, not probs.stop_gradient)
        tensors, ctx.spec = saved.pack()
        # Non-reentrant recompute restores tensors by sharing buffers; an empty one has none and
        # would come back unusable.
        ctx.empty = {
            position: tensor for position, tensor in enumerate(tensors) if 0 in tensor.shape
        }
        ctx.save_for_backward(
            *(tensor for position, tensor in enumerate(tensors) if position not in ctx.empty)
        )
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        """dx, dprobs, and the parameter gradients autograd is to accumulate (None where the node
        does).
        """
        tensors = _with_empty(ctx.saved_tensor(), ctx.empty)
        if 0 not in tensors[0].shape and not tensors[0]._is_initialized():
            raise RuntimeError(
                "x was freed between this node's forward and its backward, which reads it; needed: no _clear_data() or "
                "_clear_to_zero_allocation() on the dispatched tokens"
            )
        saved = ctx.spec.unpack(tensors)
        del tensors
        if ctx.call.settings.frees_stagewise:
            # these references would keep alive, to the end of backward, what the engine drops in
            # the middle
            ctx.container = ()
        dx, dprobs, gradients = ctx.call.backward(dout, saved)
        if ctx.call.wgrad_queue is not None:
            ctx.call.wgrad_queue.launch_after(None)  # a PyLayer cannot name the node that takes dx
        x_wanted, probs_wanted = ctx.wanted
        return (dx if x_wanted else None, dprobs if probs_wanted else None, *gradients)


def _with_empty(tensors: Sequence[Any], empty: Mapping[int, Any]) -> list[Any]:
    """The saved tensors with the empty ones back at their positions."""
    saved = iter(tensors)
    return [empty[i] if i in empty else next(saved) for i in range(len(tensors) + len(empty))]


def apply(call: MlpCall, x: Any, probs: Any) -> paddle.Tensor:
    """Run `call` under autograd."""
    return _MlpPyLayer.apply(call, x, probs, *call.parameters)
