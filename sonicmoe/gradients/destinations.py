"""A native buffer handed to the parameters that its gradients are for: to `main_grad`, to `.grad`, or
to autograd. On a GPU one kernel launch serves all of them (`launch_flush`), else plain operations
serve one at a time.

Both give the same bits: sums are formed in fp32 and rounded once to the destination's dtype.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.interface import NativeBuffer
from ..errors import LayoutError, ShapeError
from ..interop import (
    IS_PADDLE,
    current_stream,
    data_ptr,
    device_name,
    dtype_name,
    is_cuda,
    numel,
    plain_ops,
    require_same_device,
    same_device,
)
from ..jit.decided import FALLBACK, NO_FALLBACK, Decided
from ..kernels.cuda_wgrad import flush_source
from ..layouts import WeightLayout
from ..refusals import need_dtype
from ..routing.backends import arch_of
from ..weights.parameters import ExpertParameters
from .places import into_parameters, own_writes

Tensor = torch.Tensor
ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def flush_native(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    native: NativeBuffer,
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
    check_main_grads(layer, parameters, trained, native.dw1)
    order = into_parameters(device_name(native.dw1))
    with plain_ops():
        # Finding the kernel may compile and raise, so it comes before the first addition. The
        # kernel knows one layout for both projections.
        kernel = kernel_for(native.dw1) if layer.keeps_layout(parameters) else None
        found = None
        if kernel is not None:
            found = destinations_of(parameters, trained, native, through_autograd)
        order.enter(native.dw1)
        try:
            with own_writes(parameters):
                for memory in over:
                    memory.zero_()
                if kernel is not None and found is not None:
                    return launch_flush(kernel, found, layer.layout, native)
                gradients = layer.user_gradients(native, parameters)
                if through_autograd:
                    return _return_or_add(parameters, trained, gradients)
                return _add_one_by_one(trained, gradients)
        finally:
            order.leave()


def _add_one_by_one(
    trained: Sequence[bool], gradients: Iterator[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor | None]:
    """The flush by plain operations. It serves what one launch cannot: hosts, destinations that
    overlap or are strided, and experts that share a parameter, whose gradients are summed one after
    the other.
    """
    for wanted, (parameter, gradient, accumulator) in zip(trained, gradients, strict=True):
        # `user_gradients` yields fresh tensors, so a `main_grad` that is bound to one shares no
        # memory with the accumulator that is zeroed next.
        if wanted and not add_to_main_grad(parameter, gradient):
            add_to_grad(parameter, gradient)
        # At once: if memory ends at a later parameter, a second flush goes on there and adds
        # nothing twice. The kernel zeroes while it reads.
        accumulator.zero_()
    return [None] * len(trained)


def _return_or_add(
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    gradients: Iterator[tuple[Tensor, Tensor, Tensor]],
) -> list[Tensor | None]:
    """The same from inside a backward, whose `native` is dropped afterwards."""
    # A backward that runs out of memory must have handed over nothing, so all memory is taken
    # before the first addition.
    is_shared = len(set(map(id, parameters))) < len(parameters)
    added: list[tuple[Tensor, Tensor]] = []
    sums: dict[int, Tensor] = {}
    for wanted, (parameter, gradient, _) in zip(trained, gradients, strict=True):
        if wanted and hasattr(parameter, "main_grad"):
            added.append((parameter, gradient))
        elif wanted:
            earlier = sums.get(id(parameter))
            total = gradient if earlier is None else earlier + gradient
            # Rounded at once where no other expert's gradient is added, to hold half the bytes.
            sums[id(parameter)] = total if is_shared else total.to(parameter.dtype)
    # A shared parameter is an input of the autograd node once per expert; its sum is returned at
    # the first place only.
    ordered = [(parameter, sums.pop(id(parameter), None)) for parameter in parameters]
    returned = [None if total is None else total.to(p.dtype) for p, total in ordered]
    for parameter, gradient in added:
        add_to_main_grad(parameter, gradient)
    return returned


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
    if parameter.dtype == torch.float32 and place == data_ptr(parameter):
        raise LayoutError(
            f"{name_of(index)}.main_grad is the memory of the weight itself, and adding gradients "
            "would change the weight; needed: memory of its own"
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


@dataclass(frozen=True, eq=False)
class Destination:
    """The memory that a parameter's gradient goes to.

    tensor: the memory, in the parameter's shape.
    fresh: the memory holds nothing yet, so the gradient is written; otherwise it is added.
    attribute: the attribute of the parameter that fresh memory becomes once it is written; empty
        where autograd gets it instead.
    """

    parameter: Tensor
    tensor: Tensor
    fresh: bool
    attribute: str = ""

    @classmethod
    def of(cls, parameter: Tensor, through_autograd: bool, device: Any) -> Destination:
        """`main_grad` of a parameter that has the attribute, else `.grad`, or fresh memory that
        autograd accumulates there. Fresh memory is on `device`, because a parameter that was freed
        has no device to ask.
        """
        # The presence of the attribute decides and not its value: a framework that sets `main_grad
        # = None` wants an fp32 gradient there.
        attribute = "main_grad" if hasattr(parameter, "main_grad") else "grad"
        dtype = torch.float32 if attribute == "main_grad" else parameter.dtype
        if attribute == "grad" and through_autograd:
            held, attribute = None, ""
        else:
            held = getattr(parameter, attribute)
        if held is not None:
            return cls(parameter, held, False)
        made = torch.empty(tuple(parameter.shape), dtype=dtype, device=device)
        return cls(parameter, made, True, attribute)

    @property
    def returned(self) -> bool:
        """Whether the gradient is autograd's to accumulate."""
        return self.fresh and not self.attribute

    @property
    def extent(self) -> tuple[int, int]:
        """First address, and the one behind the last."""
        first = data_ptr(self.tensor)
        return first, first + numel(self.tensor) * ITEM_BYTES[self.tensor.dtype]


def destinations_of(
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    native: NativeBuffer,
    through_autograd: bool,
) -> list[Destination | None] | None:
    """One for each parameter, None for frozen ones, where one launch serves them all; else None:
    for gradients of biases, and for destinations that are strided, that overlap or that are named
    twice, which need one addition after the other.
    """
    # Experts may share a parameter. Blocks of the kernel run in any order, and two that add to one
    # address would lose an addition.
    if native.db1 is not None or len(set(map(id, parameters))) < len(parameters):
        return None
    device = native.dw1.device
    # Frozen parameters keep their place in the list with None, because the kernel finds an expert
    # by its position.
    found = [
        Destination.of(parameter, through_autograd, device) if wanted else None
        for parameter, wanted in zip(parameters, trained, strict=True)
    ]
    wanted = [destination for destination in found if destination is not None]
    return found if _fit_together(wanted, device_name(native.dw1)) else None


def launch_flush(
    kernel: Any,
    found: list[Destination | None],
    layout: WeightLayout,
    native: NativeBuffer,
) -> list[Tensor | None]:
    """Flush the native buffer to every destination and zero it, in one launch. Binds fresh memory,
    and returns what autograd is to accumulate.
    """
    table = destination_table(found, int(native.dw1.shape[0]), kernel)
    stream = current_stream(native.dw1)
    kernel.flush_gradients(
        native.dw1, native.dw2, table, layout.transposed, layout.split_half, stream
    )
    # The launch came first: if it raises, no parameter may hold memory that nobody has written.
    for destination in found:
        if destination is not None and destination.attribute:
            setattr(destination.parameter, destination.attribute, destination.tensor)
    return [None if d is None or not d.returned else d.tensor for d in found]


def _fit_together(destinations: Sequence[Destination], device: str) -> bool:
    """Whether the kernel can serve them: contiguous, of a dtype it has, on one device, none
    overlapping another.
    """
    for destination in destinations:
        tensor = destination.tensor
        is_known = tensor.dtype in ITEM_BYTES and device_name(tensor) == device
        if not is_known or not tensor.is_contiguous():
            return False
    # In ascending order of addresses an overlap of any two shows between neighbours.
    extents = sorted(destination.extent for destination in destinations)
    return all(one[1] <= other[0] for one, other in itertools.pairwise(extents))


def destination_table(
    destinations: Sequence[Destination | None], num_experts: int, kernel: Any
) -> list[int]:
    """The argument of `flush_gradients` of kernels/cuda/flush.cu, which alone knows the numbers of
    formats: (address, format) of every expert's up-projection, then of every down-projection;
    `destinations` are in that order too, one per expert or one stacked tensor each, None for
    parameters that are frozen.
    """
    # 2E matrices in all: one per destination where every expert has its own parameters, E per
    # destination where they are stacked.
    matrices = 2 * num_experts // len(destinations)
    table: list[int] = []
    for destination in destinations:
        # Address 0 tells the kernel to zero the accumulator and to write nowhere.
        if destination is None:
            table += [0, 0] * matrices
            continue
        first, end = destination.extent
        code = kernel.gradient_format(dtype_name(destination.tensor.dtype), destination.fresh)
        # Stacked matrices are contiguous, so each begins where the one before it ends.
        step = (end - first) // matrices
        for index in range(matrices):
            table += [first + index * step, code]
    return table


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
        _kernel_on.say(
            logging.WARNING,
            f"gradients on {device} are flushed by plain tensor operations: {reason}",
        )
        return None, [error]
