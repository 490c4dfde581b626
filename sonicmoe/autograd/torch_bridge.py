"""A `DifferentiableCall` as a `torch.autograd.Function`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from ..engine.interface import Saved
from .protocol import DifferentiableCall, refuse_second_derivative

Tensor = torch.Tensor
P = ParamSpec("P")
Result = TypeVar("Result")


class _CallFunction(torch.autograd.Function):
    """Arguments: the call, the number of its inputs, the inputs, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, num_inputs: int, *tensors: Tensor) -> Any:
        """Run the call. Tensors are kept through `save_for_backward` only, except a z that the
        backward drops in its middle: PyTorch holds saved tensors until a backward is over.
        """
        try:
            outputs, saved = call.forward(tensors[:num_inputs], save=True)
            ctx.call, ctx.num_inputs, ctx.spec = call, num_inputs, None
            if saved is not None:
                # Taken out before `pack`, so that the context holds the only reference to z.
                ctx.own_z = saved.take_z() if call.releases_saved else None
                # Remembered apart, because `own_z` is None again after the first backward, and a
                # second one must be told why it fails.
                ctx.has_own_z = ctx.own_z is not None
                kept, ctx.spec = saved.pack()
                ctx.save_for_backward(*kept)
        except Exception as error:
            call.explain(error, "forward")
            raise
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that want one, then those of the parameters as the call returns
        them.
        """
        refuse_second_derivative()
        saved = None
        try:
            saved = _take_saved(ctx)
            # Parameters that are no inputs of the node are the call's affair.
            reached, collected = None, False
            if ctx.call.attaches_parameters:
                following = ctx.next_functions  # one per tensor among the arguments
                reached, collected = asked_for([*map(_NODE, following[ctx.num_inputs :])])
            of_inputs, of_parameters = ctx.call.backward(
                gradients, saved, reached=reached, collected=collected
            )
        except Exception as error:
            # A backward that raised before it dropped z, for want of memory, may be repeated.
            if saved is not None and ctx.has_own_z:
                ctx.own_z = saved.take_z()
            ctx.call.explain(error, "backward")
            raise
        # PyTorch counts all arguments of `forward`: the call and the number of inputs come first,
        # and their "gradients" are the two None below.
        wanted = ctx.needs_input_grad[2 : 2 + ctx.num_inputs]
        kept = [g if want else None for g, want in zip(of_inputs, wanted, strict=True)]
        return (None, None, *kept, *(of_parameters if ctx.call.attaches_parameters else ()))


def _take_saved(ctx: Any) -> Saved | None:
    if ctx.spec is None:
        return None
    saved: Saved = ctx.spec.unpack(ctx.saved_tensors)
    if ctx.has_own_z:
        if ctx.own_z is None:
            raise RuntimeError(
                "stagewise memory dropped z in the first backward; a second one needs stagewise_memory off"
            )
        # Moved, not copied: `saved` is the last holder, and the engine frees z when it drops it
        # there.
        saved.z, ctx.own_z = ctx.own_z, None
    return saved


def asked_for(nodes: Sequence[Any]) -> tuple[list[bool], bool]:
    """Which of these nodes, None for tensors outside the graph, the running backward goes on to; and
    whether it is `torch.autograd.grad` of one of them.
    """
    # A private function, and the only one that knows which nodes the running backward will visit.
    will_run = torch._C._will_engine_execute_node
    try:
        # The usual case, without a line of Python per weight. None is refused, as is a leaf below.
        return list(map(will_run, nodes)), False
    except (RuntimeError, TypeError):
        reached, collected = [], False
    for node in nodes:
        try:
            reached.append(node is not None and will_run(node))
        except RuntimeError:
            # It raises for a leaf whose gradient `torch.autograd.grad` was asked for.
            reached.append(True)
            collected = True
    return reached, collected


def apply(
    call: DifferentiableCall, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()
) -> Any:
    """The outputs of `call` on `inputs`, under autograd."""
    # Parameters are arguments for the graph's sake: the output requires a gradient even where x and
    # probs are frozen, and the hooks of each parameter fire once per backward.
    attached = parameters if call.attaches_parameters else ()
    return apply_function(_CallFunction, (call, len(inputs)), inputs, attached)


def apply_function(
    function: type[torch.autograd.Function],
    leading: tuple[Any, ...],
    tensors: Sequence[Tensor | None],
    parameters: Sequence[Tensor] = (),
) -> Any:
    """`function.apply(*leading, *tensors, *parameters)`."""
    if _unwrap is None or _is_transforming():
        return function.apply(*leading, *tensors, *parameters)
    # `apply` itself asks every argument whether a functorch transform that has ended still wraps
    # it. Weights of a module are not wrapped, and asking 256 of them makes more calls of functions
    # than the rest of a layer.
    given = list(tensors)
    for index, tensor in enumerate(given):
        if tensor is not None:
            given[index] = _unwrap(tensor)
    apply_now: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply_now(*leading, *given, *parameters)


def eagerly(function: Callable[P, Result]) -> Callable[P, Result]:
    """`function`, which a compiled graph calls and does not look into: the graph ends before it and
    another one begins behind it.

    It launches kernels, moves rows between ranks and asks for addresses, none of which the compiler
    can trace. `torch.compiler.disable` would load the compiler, which takes a second or more, so it
    is asked by those alone who compile.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            return function(*arguments, **options)
        return torch.compiler.disable(function)(*arguments, **options)  # type: ignore[no-any-return]

    return call


def refuse_transforms(tensors: Sequence[Tensor | None]) -> None:
    """Raise where one of these is under a transform of `torch.func` or carries a tangent. Every
    operation of this package calls it: one that autograd does not see would return a tangent of 0.
    """
    if not _is_transforming() and forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and (
            _is_wrapped(tensor) or forward_ad.unpack_dual(tensor).tangent is not None
        ):
            raise NotImplementedError(
                "sonicmoe's operations have a backward alone: no tangents (torch.func.jvp, jacfwd, "
                "torch.autograd.forward_ad) and no vmap or grad of torch.func; needed: "
                "loss.backward() or torch.autograd.grad, and in place of vmap one call on tokens "
                "whose leading axes are the batch ([B, T, H]; for the node [B*T, H])"
            )


_NODE = itemgetter(0)
# What `torch.autograd.Function.apply` calls in PyTorch 2.11 and 2.13. A version that names them
# otherwise goes the longer way, through `apply` itself.
_unwrap: Any = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)
_is_transforming: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
