"""A `DifferentiableCall` as a `paddle.autograd.PyLayer`.

The rules of PyLayer (Paddle 3.3) that shape this page:

* A backward returns one gradient per *tensor* argument of the forward, in their order.
* None for a non-leaf input that wants a gradient crashes the process. A gradient for an input with
  `stop_gradient` raises.
* None for a leaf is fine, and the leaf's hooks still fire, once per backward.
* A second backward through one PyLayer crashes the process.
* `saved_tensor` is a method. Only tensors that went through `save_for_backward` take part in
  recompute without re-entrance, which restores them by sharing buffers. An empty tensor has no
  buffer and would come back unusable.
* No API names the node that runs next, or says which gradients a backward was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle.autograd import PyLayer

from ..engine.interface import Saved
from .protocol import DifferentiableCall


class _CallPyLayer(PyLayer):  # type: ignore[misc]
    """Arguments: the call, the number of its inputs, the inputs, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, num_inputs: int, *tensors: Any) -> Any:
        """Run the call. Tensors are kept through `save_for_backward` only, except empty ones."""
        inputs = tensors[:num_inputs]
        outputs, saved = call.forward(inputs, save=True)
        # The call holds no tensor that needs saving. All of them pass through `save_for_backward`,
        # or recompute would neither see nor restore them.
        ctx.call, ctx.spec = call, None
        ctx.wanted = tuple(not tensor.stop_gradient for tensor in inputs)
        if saved is not None:
            kept, ctx.spec = saved.pack()
            # Kept on the context by position. They hold no memory that a recompute would have to
            # restore.
            ctx.empty = {
                position: tensor for position, tensor in enumerate(kept) if 0 in tensor.shape
            }
            ctx.save_for_backward(
                *(tensor for position, tensor in enumerate(kept) if position not in ctx.empty)
            )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the inputs that want one, then those of the parameters as the call returns
        them.
        """
        of_inputs, of_parameters = ctx.call.backward(gradients, _take_saved(ctx))
        # An input without `stop_gradient` must get a gradient, and one with it must get none: see
        # the rules above.
        kept = (g if want else None for g, want in zip(of_inputs, ctx.wanted, strict=True))
        return (*kept, *of_parameters)


def _take_saved(ctx: Any) -> Saved | None:
    if ctx.spec is None:
        return None
    tensors = _with_empty(ctx.saved_tensor(), ctx.empty)
    x = tensors[0]  # the caller's; all others are the engine's own
    if 0 not in x.shape and not x._is_initialized():
        raise RuntimeError(
            "x was freed between this node's forward and its backward, which reads it; needed: no _clear_data() or "
            "_clear_to_zero_allocation() on the dispatched tokens"
        )
    if ctx.call.releases_saved:
        # The context's references would keep alive, to the end of the backward, the tensors that
        # the engine drops in the middle.
        # `container` is PyLayer's own list behind `saved_tensor()`.
        ctx.container = ()
    saved: Saved = ctx.spec.unpack(tensors)
    return saved


def _with_empty(tensors: Sequence[Any], empty: Mapping[int, Any]) -> list[Any]:
    """The saved tensors with the empty ones back at their positions."""
    saved = iter(tensors)
    return [empty[i] if i in empty else next(saved) for i in range(len(tensors) + len(empty))]


def apply(call: DifferentiableCall, inputs: Sequence[Any], parameters: Sequence[Any] = ()) -> Any:
    """The outputs of `call` on `inputs`, under autograd."""
    # The parameters are arguments although forward does not use them: as inputs of the node they
    # get their hooks fired, also where all other inputs are frozen.
    return _CallPyLayer.apply(call, len(inputs), *inputs, *parameters)
