"""`GradientStore`: the weight gradients of one layer, from the backward that adds them to the flush
that hands them to the parameters.

    targets ──► engine.backward_dw adds ──► note_backward ──► flush ──► main_grad, .grad or autograd
                        │ fails
                        └──► incomplete: flush refuses ──► discard
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engine.capabilities import GradientTarget
from ..engine.interface import Engine, GradientTargets, NativeBuffer, PendingWgrad
from ..errors import ConfigError
from ..interop import plain_ops, requires_grad
from ..stream_order import StreamOrder
from ..weights.parameters import ExpertParameters
from . import destinations
from .destinations import add_to_grad, add_to_main_grad, check_main_grad

Tensor = torch.Tensor


class GradientStore:
    """Owns the memory that weight gradients wait in, and orders the streams that add to it.

    The one kind of targets is the native buffer: fp32, in the engines' layout, allocated at the
    first backward. A flush converts it to each parameter's layout, adds it there in place, and
    zeroes it. A new kind would be made in `targets`, for the engines that list it, and flushed in
    its own way. Only this class and the engines know the kinds.
    """

    def __init__(self, parameters: ExpertParameters) -> None:
        """Allocates nothing."""
        self._parameters = parameters
        self._native: NativeBuffer | None = None
        self._additions = StreamOrder()
        self._waiting = 0
        self._incomplete = False

    @property
    def waiting(self) -> int:
        """How many backwards have added gradients that no flush has taken."""
        return self._waiting

    @property
    def nbytes(self) -> int:
        """Bytes held now; 0 before the first backward and after `release`."""
        return 0 if self._native is None else self._native.nbytes

    def targets(self, engine: Engine, device: Any) -> GradientTargets:
        """Where this engine is to add the gradients of a backward, zeroed at first use."""
        kinds = engine.record.gradients
        if GradientTarget.NATIVE in kinds:
            return self._native_buffer(device)
        raise ConfigError(
            f"engine {engine.name!r} adds weight gradients into {[kind.value for kind in kinds]}; "
            f"this layer has {GradientTarget.NATIVE.value!r} accumulators"
        )

    def held(self) -> dict[str, Tensor]:
        """The memory that gradients wait in, by the name of the gradient, for those who inspect it;
        empty before the first backward.
        """
        return {} if self._native is None else self._native.named()

    def add(self, engine: Engine, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Have the engine add the gradients of one backward, on the current stream."""
        try:
            # Two backwards may run on two streams and add into the same accumulators. Each waits,
            # on the device, for the additions launched before it.
            self._additions.enter(targets.anchor)
            with plain_ops():
                engine.backward_dw(pending, targets)
            self._additions.leave()
        except BaseException:
            # Out of memory between dw2 and dw1, for one: nobody can take back what was added.
            self._incomplete = True
            raise

    def note_backward(self) -> None:
        """A backward has added its gradients, or has handed them to a queue that will."""
        self._waiting += 1

    def flush(self) -> None:
        """Add what waits into `main_grad` (or `.grad`) of every trainable parameter. Does nothing
        where no backward ran since the last flush.

        Raises:
            RuntimeError: a backward failed while it added; nothing is flushed.
            DTypeError, ShapeError, DeviceError: see `check_main_grad`; nothing is flushed.
        """
        self._flush(through_autograd=False)

    def flush_through_autograd(self) -> list[Tensor | None]:
        """Like `flush`, from inside a backward: a gradient without a `main_grad` to go to is
        returned, in `parameters()` order.

        Autograd then accumulates it into `.grad`; either way the framework fires each parameter's
        hooks exactly once.
        """
        return self._flush(through_autograd=True)

    def discard(self) -> None:
        """Drop what waits: its gradients are not wanted."""
        if self._native is not None:
            self._additions.enter(self._native.dw1)
            _zero(self._native)
            self._additions.leave()
        self._waiting, self._incomplete = 0, False

    def release(self) -> None:
        """Free the memory until the next backward.

        Raises:
            RuntimeError: gradients wait that were not flushed.
        """
        if self._waiting or self._incomplete:
            raise RuntimeError(
                "accumulators hold gradients that were never flushed; call step() or "
                "discard_grads() first"
            )
        self._native = None

    def _native_buffer(self, device: Any) -> NativeBuffer:
        if self._native is None:
            (experts, n1, hidden), (_, _, intermediate) = self._parameters.native_shapes()
            self._native = NativeBuffer.zeros(experts, n1, hidden, intermediate, False, device)
        return self._native

    def _flush(self, through_autograd: bool) -> list[Tensor | None]:
        """The gradients that autograd is to accumulate, None for every other parameter."""
        parameters, native = self._parameters.parameters(), self._native
        # A backward that failed is not counted as waiting, but a part of its gradients lies in the
        # accumulators, and `_check_all` must refuse them.
        if native is None or not (self._waiting or self._incomplete):
            return [None] * len(parameters)
        self._check_all(parameters, native)
        with plain_ops():
            # Finding the kernel may compile and raise, so it comes before the first addition.
            launch = destinations.one_launch(parameters, native, through_autograd)
            self._additions.enter(native.dw1)
            if launch is not None:
                returned = launch.run(self._parameters.layout, native)
            else:
                # Plain operations leave the accumulators as they are; the kernel zeroes them while
                # it reads.
                returned = self._add_one_by_one(parameters, native, through_autograd)
                _zero(native)
            self._additions.leave()
        # Last: after a launch that failed the gradients still wait, and the flush may be repeated.
        self._waiting = 0
        return returned

    def _check_all(self, parameters: Sequence[Tensor], native: NativeBuffer) -> None:
        """Before the first addition, so that a flush that raises may be repeated and adds nothing
        twice.
        """
        if self._incomplete:
            raise RuntimeError(
                "a backward failed while it added weight gradients, and left a part of them in the "
                "node; call node.discard_grads(), which drops those of every backward since the "
                "last step(), and run the step again or skip it"
            )
        for parameter in parameters:
            if requires_grad(parameter):
                check_main_grad(parameter, native.dw1)

    def _add_one_by_one(
        self, parameters: Sequence[Tensor], native: NativeBuffer, through_autograd: bool
    ) -> list[Tensor | None]:
        """The flush by plain operations. It serves what one launch cannot: hosts, destinations that
        overlap or are strided, and experts that share a parameter, whose gradients are summed one
        after the other.
        """
        returned: dict[int, Tensor] = {}
        for parameter, gradient in self._parameters.user_gradients(native):
            # `user_gradients` yields fresh tensors, so a `main_grad` that is bound to one shares no
            # memory with the accumulators that are zeroed next.
            if not requires_grad(parameter) or add_to_main_grad(parameter, gradient):
                continue
            if through_autograd:
                earlier = returned.get(id(parameter))
                returned[id(parameter)] = gradient if earlier is None else earlier + gradient
            else:
                add_to_grad(parameter, gradient)
        # A shared parameter is an input of the autograd node once per expert; its sum is returned
        # at the first place only.
        ordered = [(parameter, returned.pop(id(parameter), None)) for parameter in parameters]
        return [None if sum_ is None else sum_.to(p.dtype) for p, sum_ in ordered]


def _zero(targets: GradientTargets) -> None:
    with plain_ops():
        for tensor in targets.tensors():
            tensor.zero_()
