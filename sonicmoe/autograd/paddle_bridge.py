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
* Writes to a saved tensor are counted (`inplace_version`), and nothing compares the counts. Recompute
  without re-entrance hands out tensors under other names, with counts of their own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import paddle
from paddle.autograd import PyLayer

from ..engine.interface import Saved
from ..quant.tokens import is_fp8
from .protocol import DifferentiableCall, refuse_second_derivative

P = ParamSpec("P")
Result = TypeVar("Result")


class _CallPyLayer(PyLayer):  # type: ignore[misc]
    """Arguments: the call, the number of its inputs, the inputs, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, num_inputs: int, *tensors: Any) -> Any:
        """Run the call. Tensors are kept through `save_for_backward` only, except empty ones."""
        try:
            outputs, saved = call.forward(tensors[:num_inputs], save=True)
            _save(ctx, call, tensors, num_inputs, saved)
            _take_gradients_as_they_come(ctx, outputs)
        except Exception as error:
            call.explain(error, "forward")
            raise
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the inputs that want one, then those of the parameters as the call returns
        them.
        """
        refuse_second_derivative()
        gradients = tuple(map(_in_dtype, gradients, ctx.dtypes))
        asked, named = _asked_for()
        reached = [wanted and (named is None or n in named) for n, wanted in ctx.parameters]
        try:
            of_inputs, of_parameters = ctx.call.backward(
                gradients,
                _take_saved(ctx),
                reached=reached,
                collected=named is not None and any(reached),
            )
        except Exception as error:
            ctx.call.explain(error, "backward")
            raise
        kept = (
            gradient if _wants(asked, *about) else None
            for gradient, about in zip(of_inputs, ctx.inputs, strict=True)
        )
        return (*kept, *(of_parameters if ctx.call.attaches_parameters else ()))


class _Unattached:
    """What a backward asks a parameter for that is no input of its node: no tensor to Paddle."""

    __slots__ = ("name", "stop_gradient")

    def __init__(self, parameter: Any) -> None:
        self.name, self.stop_gradient = parameter.name, parameter.stop_gradient


def _take_gradients_as_they_come(ctx: Any, outputs: Any) -> None:
    # Otherwise Paddle casts each to the dtype of its output before anybody sees it, also the codes
    # of an e4m3 gradient, whose scales it does not know.
    ctx.set_grad_in_dtype_consistent(False)
    several = isinstance(outputs, (list, tuple))
    ctx.dtypes = [output.dtype for output in (outputs if several else (outputs,))]


def _in_dtype(gradient: Any, dtype: Any) -> Any:
    """What Paddle would have delivered, but for codes."""
    plain = gradient.dtype == dtype or is_fp8(gradient)
    return gradient if plain else gradient.astype(dtype)


def _save(ctx: Any, call: DifferentiableCall, tensors: Sequence[Any], num: int, saved: Any) -> None:
    """Fill the context; the first `num` tensors are the inputs."""
    # The call holds no tensor that needs saving. All of them pass through `save_for_backward`, or
    # recompute would neither see nor restore them.
    ctx.call, ctx.spec = call, None
    ctx.inputs = tuple((t.name, t.is_leaf, not t.stop_gradient) for t in tensors[:num])
    ctx.parameters = tuple((t.name, not t.stop_gradient) for t in tensors[num:])
    if saved is None:
        return
    kept, ctx.spec = saved.pack()
    # Kept on the context by position. They hold no memory that a recompute would have to restore.
    ctx.empty = {position: tensor for position, tensor in enumerate(kept) if 0 in tensor.shape}
    filled = kept
    if ctx.empty:
        filled = [tensor for position, tensor in enumerate(kept) if position not in ctx.empty]
    ctx.save_for_backward(*filled)
    # The caller's x, or its codes and scales; all others are the engine's own.
    ctx.given = [(x.name, x.inplace_version) for x in kept[: ctx.spec.given]]


def _take_saved(ctx: Any) -> Saved | None:
    if ctx.spec is None:
        return None
    tensors = _with_empty(ctx.saved_tensor(), ctx.empty)
    for argument, x, known in zip(("x", "x_scale"), tensors, ctx.given, strict=False):
        _check_unchanged(argument, x, *known)
    if ctx.call.releases_saved:
        # The context's references would keep alive, to the end of the backward, the tensors that
        # the engine drops in the middle.
        # `container` is PyLayer's own list behind `saved_tensor()`.
        ctx.container = ()
    saved: Saved = ctx.spec.unpack(tensors)
    return saved


def _check_unchanged(argument: str, x: Any, name: str, writes: int) -> None:
    """Refuse a tensor of the caller that was freed or written since the forward."""
    if 0 not in x.shape and not x._is_initialized():
        raise RuntimeError(
            f"{argument} was freed between this node's forward and its backward, which reads it; needed: no _clear_data() or "
            "_clear_to_zero_allocation() on the dispatched tokens"
        )
    if x.name == name and x.inplace_version != writes:
        raise RuntimeError(
            f"{argument} was written in place between this operation's forward and its backward, which reads "
            f"it (its inplace_version was {writes} and is {x.inplace_version}); needed: a "
            "copy for the write, or the write after the backward"
        )


def _wants(asked: set[str] | None, name: str, is_leaf: bool, requires_grad: bool) -> bool:
    """Whether Paddle takes a gradient for an input; see the rules above.

    Paddle counts a leaf that `paddle.grad` was not asked for among those with `stop_gradient`.
    """
    return requires_grad and (asked is None or not is_leaf or name in asked)


def _asked_for() -> tuple[set[str] | None, set[str] | None]:
    """Names of the inputs, and of the parameters, whose gradients the running backward was asked
    for; None: of all.

    `paddle.grad` asks for the gradients of its `inputs`, `Tensor.backward` and
    `paddle.autograd.backward` for all.
    """
    # Paddle runs a backward on the thread that asked for it, and tells no node what was asked for.
    # The arguments of `paddle.grad` stand in its frame. The nearest frame counts, because a
    # backward may run inside another one.
    frame: FrameType | None = sys._getframe()
    recomputed = False
    while frame is not None:
        if frame.f_code is _PADDLE_GRAD:
            inputs = frame.f_locals["inputs"]
            several = isinstance(inputs, (list, tuple, set))
            names = {tensor.name for tensor in (inputs if several else (inputs,))}
            return (None if recomputed else names), names
        if frame.f_code in _BACKWARDS:
            if not _is_recompute(frame):
                break
            # A backward of copies of the inputs, all of which the one around it needs. Parameters
            # are the same tensors in both.
            recomputed = True
        frame = frame.f_back
    return None, None


def _is_recompute(frame: FrameType) -> bool:
    """Whether re-entrant recompute called the function of this frame, or of decorators around it."""
    caller = frame.f_back
    for _ in range(_DECORATORS):
        if caller is None:
            return False
        if str(caller.f_globals.get("__name__")).startswith("paddle.distributed.fleet.recompute"):
            return True
        caller = caller.f_back
    return False


def _code_of(function: Any) -> Any:
    """The code of the function inside Paddle's wrappers, which decide between its two modes."""
    return inspect.unwrap(function).__code__


_PADDLE_GRAD = _code_of(paddle.grad)
_BACKWARDS = {_code_of(paddle.Tensor.backward), _code_of(paddle.autograd.backward)}
_DECORATORS = 3  # frames at most between a function of Paddle's and its caller


def _with_empty(tensors: Sequence[Any], empty: Mapping[int, Any]) -> list[Any]:
    """The saved tensors with the empty ones back at their positions."""
    if not empty:
        return list(tensors)
    saved = iter(tensors)
    return [empty[i] if i in empty else next(saved) for i in range(len(tensors) + len(empty))]


def apply(call: DifferentiableCall, inputs: Sequence[Any], parameters: Sequence[Any] = ()) -> Any:
    """The outputs of `call` on `inputs`, under autograd."""
    # The parameters are arguments although forward does not use them: as inputs of the node they
    # get their hooks fired, also where all other inputs are frozen.
    if not call.attaches_parameters:
        parameters = [_Unattached(parameter) for parameter in parameters]
    return _CallPyLayer.apply(call, len(inputs), *inputs, *parameters)


def eagerly(function: Callable[P, Result]) -> Callable[P, Result]:
    """`function` itself: static graphs are refused by their values."""
    return function


def refuse_transforms(tensors: Sequence[Any]) -> None:
    """Paddle has no forward mode for operations that run eagerly."""
