"""A native buffer handed to the parameters that its gradients are for: to `main_grad`, to `.grad`, or
to autograd. On a GPU one kernel launch serves all of them (`launch_flush`), else plain operations
serve one at a time.

Both give the same bits: sums are formed in fp32 and rounded once to the destination's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..engine.gradient_places import extent_of, first_overlap, overlaps_itself
from ..engine.settings import GradientMode
from ..engine.targets import GradientTargets
from ..errors import LayoutError, ShapeError
from ..interop import (
    IS_PADDLE,
    current_stream,
    data_ptr,
    device_name,
    dtype_name,
    holds_memory,
    is_cuda,
    plain_ops,
    require_same_device,
    same_device,
)
from ..jit.decided import FALLBACK, NO_FALLBACK, Decided
from ..kernels.cuda_wgrad import flush_source
from ..log import log_once
from ..refusals import need_dtype
from ..routing.backends import arch_of
from ..weights.parameters import ExpertParameters
from .waiting import into_parameters, own_writes

Tensor = torch.Tensor
FLUSHED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the kernel's destinations


def flush_native(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    native: GradientTargets,
    *,
    through_autograd: bool,
    over: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Add the gradients in `native` to those of `parameters` that `trained` marks, and zero
    `native`. Where it raises, each gradient is either with its parameter or still in `native`.

    through_autograd: gradients of parameters without `main_grad` are returned, by position, and not
        added to `.grad`. Where it raises then, nothing was handed over.
    over: each `main_grad` whose contents the gradients take the place of.
    """
    # Before the first addition, so that a flush that raises may be repeated and adds nothing twice.
    check_main_grads(layer, parameters, trained, native.anchor)
    order = into_parameters(device_name(native.anchor))
    with plain_ops():
        # Finding the kernel may compile and raise, so it comes before the first addition.
        kernel = kernel_for(native.anchor) if _is_one_launch(layer, parameters) else None
        found = None
        if kernel is not None:
            found = _destinations_of(parameters, trained, native.anchor, through_autograd)
        order.enter(native.anchor)
        try:
            with own_writes(parameters):
                for memory in over:
                    memory.zero_()
                if kernel is not None and found is not None:
                    return launch_flush(kernel, found, layer, parameters, native)
                every = _arranged(layer, parameters, trained, native, through_autograd)
                if not through_autograd:
                    return _add_one_by_one(every)
                # A backward that runs out of memory must have handed over nothing, so all memory is
                # taken before the first addition.
                return _return_or_add(list(every))
        finally:
            order.leave()


# ---- plain operations ----


def _arranged(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    native: GradientTargets,
    rounds: bool,
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Each parameter; its gradient in the layout in which it leaves, None where nobody wants it, made
    one by one; and the part of `native` that it was made of. rounds: what autograd gets is rounded.
    """
    sums = native.tensors()
    if layer.are_separate:
        sums = tuple(stack[expert] for stack in sums for expert in range(int(stack.shape[0])))
    downs = len(parameters) // 2 if layer.are_separate else 1  # where down-projections begin
    is_shared = len(set(map(id, parameters))) < len(parameters)
    for index, (parameter, part) in enumerate(zip(parameters, sums, strict=True)):
        if not trained[index]:
            yield parameter, None, part
            continue
        gradient, layout = part, layer.destined(index, parameter)
        # Before it is moved, to move and to hold half the bytes. The sum of experts that share a
        # parameter is rounded when it is whole.
        if rounds and not is_shared and not hasattr(parameter, "main_grad"):
            gradient = part.to(parameter.dtype)
        if layer.has_biases and index >= 2:
            # A bias has no orientation, and b2 no halves.
            gradient = layout.user_b1(gradient) if index == 2 else gradient
        else:
            gradient = (layout.user_w1 if index < downs else layout.user_w2)(gradient)
        # The accumulators go on, or are larger than it is. Those of one call are dropped.
        if data_ptr(gradient) == data_ptr(part) and not layer.is_passed:
            gradient = gradient.clone()
        yield parameter, gradient, part


def _add_one_by_one(every: Iterable[tuple[Tensor, Tensor | None, Tensor]]) -> list[Tensor | None]:
    """The flush by plain operations. It serves what one launch cannot: hosts, destinations that
    overlap or are strided, and experts that share a parameter, whose gradients are summed one after
    the other.
    """
    returned: list[Tensor | None] = []
    for parameter, gradient, sums in every:
        if gradient is not None and not add_to_main_grad(parameter, gradient):
            add_to_grad(parameter, gradient)
        # At once: if memory ends at a later parameter, a second flush goes on there and adds
        # nothing twice. The kernel zeroes while it reads.
        sums.zero_()
        returned.append(None)
    return returned


def _return_or_add(every: Sequence[tuple[Tensor, Tensor | None, Tensor]]) -> list[Tensor | None]:
    """The flush from inside a backward, whose accumulators are dropped afterwards: gradients of
    parameters without `main_grad` are returned.
    """
    returned: list[Tensor | None] = [None] * len(every)
    # A shared parameter is an input of the autograd node once per expert; its sum is returned at
    # the first place only.
    first: dict[int, int] = {}
    for index, (parameter, gradient, _) in enumerate(every):
        if gradient is not None and not add_to_main_grad(parameter, gradient):
            place = first.setdefault(id(parameter), index)
            earlier = returned[place]
            returned[place] = gradient if earlier is None else earlier + gradient
    pairs = zip(every, returned, strict=True)
    return [None if total is None else total.to(each[0].dtype) for each, total in pairs]


def check_main_grads(
    layer: ExpertParameters, parameters: Sequence[Tensor], trained: Sequence[bool], like: Tensor
) -> None:
    """Check that gradients on the device of `like` can be added into the `main_grad` of those
    parameters that `trained` marks, where there is one.
    """
    for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
        main_grad = getattr(parameter, "main_grad", None)
        if wanted and main_grad is not None:
            _check_main_grad(parameter, main_grad, like, layer.name_of, index)


def _check_main_grad(
    parameter: Tensor, main_grad: Tensor, like: Tensor, name_of: Callable[[int], str], index: int
) -> None:
    # Messages are composed only where one is needed, because every flush checks.
    shape, found = tuple(parameter.shape), tuple(main_grad.shape)
    known = [shape, (shape[0], shape[2], shape[1])] if len(shape) == 3 else [shape]
    if main_grad.dtype != torch.float32:
        need_dtype(f"{name_of(index)}.main_grad", main_grad, torch.float32)
    if found not in known:
        other = f", and {known[1]} in its other layout" if len(known) > 1 else ""
        raise ShapeError(
            f"{name_of(index)}.main_grad has shape {found}; the parameter's is {shape}{other}"
        )
    if not same_device(main_grad, like):
        require_same_device([("the gradient", like), (f"{name_of(index)}.main_grad", main_grad)])
    # Memory may be gone (FSDP, Paddle's sharding) although shape and dtype are still there.
    place = data_ptr(main_grad)
    if place == 0:
        raise LayoutError(f"{name_of(index)}.main_grad has no memory: it was freed")
    # A weight whose copies are read may have no memory, and then Paddle cannot say where it lies.
    in_fp32 = parameter.dtype == torch.float32 and holds_memory(parameter)
    if in_fp32 and place == data_ptr(parameter):
        raise LayoutError(
            f"{name_of(index)}.main_grad is the memory of the weight itself, and adding gradients "
            "would change the weight; needed: memory of its own"
        )
    if not main_grad.is_contiguous() and overlaps_itself(main_grad):
        raise LayoutError(
            f"{name_of(index)}.main_grad has strides {tuple(main_grad.stride())}, under which its "
            "elements overlap; needed: memory of its own for each element"
        )


def add_to_main_grad(parameter: Tensor, gradient: Tensor) -> bool:
    """Add an fp32 gradient into `parameter.main_grad` in place, binding it where it is None; False
    where there is no such attribute.
    """
    if not hasattr(parameter, "main_grad"):
        return False
    # It may be a slice of a communication buffer: a new tensor here would never be reduced. It is
    # read anew every time, because frameworks rebind it between steps.
    if parameter.main_grad is None:
        parameter.main_grad = gradient
    else:
        parameter.main_grad.add_(gradient)
    return True


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add an fp32 gradient to `parameter.grad`, in the parameter's dtype."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
        return
    # Rounding the gradient before the sum would round twice, and give other bits than the kernel.
    total = (parameter.grad.to(torch.float32) + gradient).to(parameter.dtype)
    if IS_PADDLE:  # where `grad` is a new handle at each reading
        parameter.grad = total
    else:
        parameter.grad.copy_(total)


# ---- one launch ----


def _is_one_launch(layer: ExpertParameters, parameters: Sequence[Tensor]) -> bool:
    """Whether the kernel knows the layouts, of which it takes one for both projections, and no two
    experts share a parameter: blocks of the kernel run in any order, and two that add to one address
    would lose an addition.
    """
    # Of gradients that all are autograd's, one plain operation makes what it takes, and the kernel
    # would also zero memory that nobody reads again.
    if layer.is_passed or len(set(map(id, parameters))) < len(parameters):
        return False
    return all(layer.destined(*place) == layer.layout for place in enumerate(parameters))


class Destinations(NamedTuple):
    """The memory that each parameter's gradient goes to, in the parameter's shape; None for frozen ones,
    which keep their place, because the kernel finds an expert by its position.

    fresh: by position, memory that holds nothing yet, so that the gradient is written and not added; and
        the attribute of the parameter that it becomes, empty where autograd gets it.
    """

    tensors: list[Tensor | None]
    fresh: dict[int, str]


def _destinations_of(
    parameters: Sequence[Tensor], trained: Sequence[bool], like: Tensor, through_autograd: bool
) -> Destinations | None:
    """`main_grad` of each parameter that has the attribute, else `.grad`, or memory that autograd
    accumulates there. None where the kernel cannot serve them together: where one is strided, of a dtype
    that it does not know or on another device than `like`, or overlaps another.
    """
    found = Destinations([], {})
    for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
        # The presence of the attribute decides and not its value: a framework that sets `main_grad
        # = None` wants an fp32 gradient there.
        is_main = hasattr(parameter, "main_grad")
        attribute = "main_grad" if is_main else "" if through_autograd else "grad"
        held = getattr(parameter, attribute) if wanted and attribute else None
        if wanted and held is None:
            dtype = torch.float32 if is_main else parameter.dtype
            # On the device of `like`, because a parameter that was freed has no device to ask.
            held = torch.empty(tuple(parameter.shape), dtype=dtype, device=like.device)
            found.fresh[index] = attribute
        found.tensors.append(held)
    device, tensors = device_name(like), [each for each in found.tensors if each is not None]
    for tensor in tensors:
        is_known = tensor.dtype in FLUSHED_DTYPES and device_name(tensor) == device
        if not is_known or not tensor.is_contiguous():
            return None
    extents = ((*extent_of(tensor), index) for index, tensor in enumerate(tensors))
    return None if first_overlap(extents) else found


def launch_flush(
    kernel: Any,
    found: Destinations,
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    native: GradientTargets,
) -> list[Tensor | None]:
    """Flush the native buffer to every destination and zero it, in one launch. Binds fresh memory,
    and returns what autograd is to accumulate.
    """
    tensors, layout = found.tensors, layer.layout
    fresh = [index in found.fresh for index in range(len(tensors))]
    # They lie as their parameters do, which is what fresh memory does.
    table = flush_table(kernel, layer.targets(tensors, GradientMode.FRESH), fresh)
    where = layout.transposed, layout.split_half
    kernel.flush_gradients(native.dw1, native.dw2, table, *where, current_stream(native.dw1))
    # The launch came first: if it raises, no parameter may hold memory that nobody has written.
    for index, attribute in found.fresh.items():
        if attribute:
            setattr(parameters[index], attribute, tensors[index])
    return [each if found.fresh.get(index) == "" else None for index, each in enumerate(tensors)]


def flush_table(kernel: Any, targets: GradientTargets, fresh: Sequence[bool]) -> list[int]:
    """The argument of `flush_gradients` of kernels/cuda/flush.cu, which alone knows the numbers of
    formats: (address, format) of every expert's up-projection, then of every down-projection.
    Address 0 tells the kernel to zero the accumulator and to write nowhere.

    fresh: whether each tensor is written, and not added to.
    """
    tensors = [*targets.up.tensors, *targets.down.tensors]
    formats = [
        0 if tensor is None else kernel.gradient_format(dtype_name(tensor.dtype), is_fresh)
        for tensor, is_fresh in zip(tensors, fresh, strict=True)
    ]
    places = targets.up.places(False) + targets.down.places(False)
    together = len(places) // len(tensors)  # matrices of a stacked tensor
    every = ((place.address, formats[index // together]) for index, place in enumerate(places))
    return [number for pair in every for number in pair]


def kernel_for(accumulator: Tensor) -> Any:
    """The kernel that flushes `accumulator`; None on the host, and where there is no kernel, which
    is logged. A device is asked once, and again only where the obstacle may pass (`Decided`). A
    compile that is forbidden, or waits too long for another process's, raises.
    """
    return _kernel_on(device_name(accumulator)) if is_cuda(accumulator) else None


@Decided
def _kernel_on(device: str) -> tuple[Any, list[Exception]]:
    try:
        return flush_source(arch_of(device)).load(), []
    except NO_FALLBACK:
        raise
    except FALLBACK as error:
        # Compilers print pages. The first line is enough for a log that goes on working.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = "gradients on %s are flushed by plain tensor operations: %s"
        log_once(logging.WARNING, line, device, reason)
        return None, [error]
