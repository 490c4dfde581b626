"""A native buffer handed to the parameters that its gradients are for: to `main_grad`, to `.grad`,
or to autograd. In one launch on a GPU, else by plain operations; both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..engine.interface import NativeBuffer
from ..interop import device_name, plain_ops
from ..weights.parameters import ExpertParameters
from . import destinations
from .places import into_parameters, own_writes

Tensor = torch.Tensor


def flush_native(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    native: NativeBuffer,
    *,
    through_autograd: bool,
) -> list[Tensor | None]:
    """Add the gradients in `native` to those of `parameters` that `trained` marks, and zero
    `native`. Where it raises, each gradient is either with its parameter or still in `native`.

    through_autograd: gradients of parameters without `main_grad` are returned, by position, and not
        added to `.grad`. Where it raises then, nothing was handed over.
    """
    # Before the first addition, so that a flush that raises may be repeated and adds nothing twice.
    destinations.check_main_grads(layer, parameters, trained, native.dw1)
    order = into_parameters(device_name(native.dw1))
    with plain_ops():
        # Finding the kernel may compile and raise, so it comes before the first addition. The
        # kernel knows one layout for both projections.
        kernel = destinations.kernel_for(native.dw1) if layer.keeps_layout(parameters) else None
        found = None
        if kernel is not None:
            found = destinations.destinations_of(parameters, trained, native, through_autograd)
        order.enter(native.dw1)
        try:
            with own_writes(parameters):
                if kernel is not None and found is not None:
                    return destinations.launch_flush(kernel, found, layer.layout, native)
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
        if wanted and not destinations.add_to_main_grad(parameter, gradient):
            destinations.add_to_grad(parameter, gradient)
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
        destinations.add_to_main_grad(parameter, gradient)
    return returned
