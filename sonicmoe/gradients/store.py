"""`GradientStore`: the weight gradients of one layer, from the backward that adds them to the flush
that hands them to the parameters.

    targets ──► engine.backward_dw adds ──► note_backward ──► flush ──► main_grad, .grad or autograd
                        │ fails after its first addition
                        └──► incomplete: flush refuses ──► discard

Running out of memory loses nothing: engines take theirs before the first addition, and a flush that
ends early leaves every gradient either with its parameter or here.
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
        """Have the engine add the gradients of one backward, on the current stream.

        Where it raises between its additions, the sums stay incomplete, because nobody can take
        back what was added.
        """
        # Two backwards may run on two streams and add into the same accumulators. Each waits, on
        # the device, for the additions launched before it.
        self._additions.enter(targets.anchor)
        try:
            with plain_ops():
                engine.backward_dw(pending, targets)
        except BaseException:
            if targets.adding:
                self.give_up()
            targets.adding = False
            raise
        finally:
            self._additions.leave()

    def give_up(self) -> None:
        """Gradients of a backward are lost; from now on every flush refuses, until `discard`."""
        self._incomplete = True

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
        hooks exactly once. Where it raises, nothing was handed over, and what waited is dropped:
        it was this backward's, which may then be repeated.
        """
        try:
            return self._flush(through_autograd=True)
        except BaseException:
            self.discard()
            raise

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
            try:
                if launch is not None:
                    returned = launch.run(self._parameters.layout, native)
                else:
                    returned = self._add_one_by_one(parameters, native, through_autograd)
            finally:
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
        after the other. The accumulators are zeroed; the kernel does that while it reads.
        """
        gradients = self._parameters.user_gradients(native)
        returned: list[Tensor | None] = [None] * len(parameters)
        if through_autograd:
            # A backward that runs out of memory must have handed over nothing, so all memory is
            # taken before the first addition.
            made = list(gradients)
            returned, gradients = _for_autograd(parameters, made), iter(made)
        for parameter, gradient, accumulator in gradients:
            # `user_gradients` yields fresh tensors, so a `main_grad` that is bound to one shares no
            # memory with the accumulator that is zeroed next.
            trained = requires_grad(parameter)
            if trained and not add_to_main_grad(parameter, gradient) and not through_autograd:
                add_to_grad(parameter, gradient)
            # At once: if memory ends at a later parameter, a second flush goes on there and adds
            # nothing twice.
            accumulator.zero_()
        return returned


def _for_autograd(
    parameters: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor | None]:
    """The gradients of the parameters that have no `main_grad`, in their dtype; None for others."""
    sums: dict[int, Tensor] = {}
    for parameter, gradient, _ in gradients:
        if requires_grad(parameter) and not hasattr(parameter, "main_grad"):
            earlier = sums.get(id(parameter))
            sums[id(parameter)] = gradient if earlier is None else earlier + gradient
    # A shared parameter is an input of the autograd node once per expert; its sum is returned at
    # the first place only.
    ordered = [(parameter, sums.pop(id(parameter), None)) for parameter in parameters]
    return [None if sum_ is None else sum_.to(p.dtype) for p, sum_ in ordered]


def _zero(targets: GradientTargets) -> None:
    with plain_ops():
        for tensor in targets.tensors():
            tensor.zero_()
