"""The node's call as a `paddle.autograd.PyLayer`.

Rules of PyLayer that shape this page: backward returns one gradient per *tensor* argument; None for a non-leaf input that wants a
gradient crashes the process, a gradient for a `stop_gradient` input raises; None for a leaf parameter is fine and still fires its
hooks, once per backward; `saved_tensor` is a method, and only what went through `save_for_backward` takes part in recompute.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer

from .mlp_call import MlpCall


class _MlpPyLayer(PyLayer):  # type: ignore[misc]
    """Inputs: call, x, probs, then every expert parameter."""

    @staticmethod
    def forward(ctx: Any, call: MlpCall, x: Any, probs: Any, *parameters: Any) -> Any:
        """Run the call; keep tensors through `save_for_backward` only, but for a z that must be droppable mid-backward."""
        out, saved = call.forward(x, probs, save=True)
        assert saved is not None
        ctx.call = call
        ctx.wanted = (not x.stop_gradient, not probs.stop_gradient)
        ctx.own_z = saved.take_z() if call.settings.frees_stagewise else None
        tensors, ctx.spec = saved.pack()
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        """dx, dprobs, and the parameter gradients autograd is to accumulate (None where the node does)."""
        saved = ctx.spec.unpack(ctx.saved_tensor())
        if ctx.own_z is not None:
            saved.z, ctx.own_z = ctx.own_z, None
        dx, dprobs, gradients = ctx.call.backward(dout, saved)
        x_wanted, probs_wanted = ctx.wanted
        return (dx if x_wanted else None, dprobs if probs_wanted else None, *gradients)


def apply(call: MlpCall, x: Any, probs: Any) -> paddle.Tensor:
    """Run `call` under autograd."""
    return _MlpPyLayer.apply(call, x, probs, *call.experts.source.parameters())
