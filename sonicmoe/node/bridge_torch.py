"""The node's call as a `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .mlp_call import MlpCall

Tensor = torch.Tensor


class _MlpFunction(torch.autograd.Function):
    """Inputs: call, x, probs, then every expert parameter, so that frozen tokens cannot cut the
    weights off the graph.
    """

    @staticmethod
    def forward(ctx: Any, call: MlpCall, x: Tensor, probs: Tensor, *parameters: Tensor) -> Tensor:
        """Run the call; keep tensors through `save_for_backward` only, but for a z that must be
        droppable mid-backward.
        """
        out, saved = call.forward(x, probs, save=True)
        assert saved is not None
        ctx.call = call
        ctx.own_z = saved.take_z() if call.settings.frees_stagewise else None
        ctx.has_own_z = ctx.own_z is not None
        tensors, ctx.spec = saved.pack()
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        """dx, dprobs, and the parameter gradients autograd is to accumulate (None where the node
        does).
        """
        saved = ctx.spec.unpack(ctx.saved_tensors)
        if ctx.has_own_z:
            if ctx.own_z is None:
                raise RuntimeError(
                    "stagewise memory dropped z in the first backward; a second one needs stagewise_memory off"
                )
            saved.z, ctx.own_z = ctx.own_z, None
        ctx.call.reaches_weights = _reaches_any(
            node for node, _ in ctx.next_functions[2:]
        )  # behind x and probs
        dx, dprobs, gradients = ctx.call.backward(dout, saved)
        if ctx.call.wgrad_queue is not None:
            ctx.call.wgrad_queue.launch_after(
                ctx.next_functions[0][0]
            )  # x, the first tensor among the inputs
        _, x_wanted, probs_wanted, *_ = ctx.needs_input_grad
        return (None, dx if x_wanted else None, dprobs if probs_wanted else None, *gradients)


def _reaches_any(nodes: Iterable[Any]) -> bool:
    """Whether the backward that runs goes on to one of these nodes: not if it was asked for
    gradients of other tensors only.
    """
    try:
        return any(node is not None and torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # `torch.autograd.grad` of a leaf
        return True


def apply(call: MlpCall, x: Tensor, probs: Tensor) -> Tensor:
    """Run `call` under autograd."""
    return _MlpFunction.apply(call, x, probs, *call.parameters)  # type: ignore[no-any-return]
