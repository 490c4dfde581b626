"""Weight gradients that are added after their backward, where a schedule takes them.

A framework fires the hooks of every weight that is an input of an autograd node when the backward
of that node ends, before an addition that a schedule puts into a pipeline bubble. So a call whose
gradients are offered does not take its weights as inputs, and the hooks of weights that the
schedule leaves here are fired here. The destination of a gradient is looked up when it is added: by
then `main_grad` may be another tensor.

    backward ── offer(down) ──► taken: the schedule runs it, then fires the hooks
             └─ offer(up) ────► left:  added now, then the hooks are fired here

Megatron-Core's schedule takes all gradients of a backward at once (`WgradStore`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

import torch

from ..borrowed import Borrowed
from ..config import SonicMoEConfig
from ..engine.interface import Engine, EngineSettings, PendingWgrad, Tokens
from ..errors import LayoutError
from ..gradients.batch import has_main_grad
from ..gradients.sink import GradientSink
from ..interop import requires_grad
from ..out_of_memory import advising
from ..quant.format import BlockScaledTensor
from ..quant.tokens import anchor_of

Tensor = torch.Tensor


class WgradOffer(Protocol):
    """Asked once per weight and backward whether it takes the addition of its gradient."""

    def __call__(self, position: int, weight: Tensor, run: Callable[[], None]) -> bool:
        """`position` of the weight among the layer's parameters; `run` adds the gradient, and is to
        be called once by whoever returns True.
        """
        ...


class WgradWork(NamedTuple):
    """What an addition needs besides its operands: no activation, and not the engine weights."""

    sink: GradientSink
    config: SonicMoEConfig
    engine: Engine
    settings: EngineSettings
    parameters: Sequence[Tensor]

    def offer(
        self, offer: WgradOffer | WgradStore, trained: Sequence[bool], pending: PendingWgrad
    ) -> None:
        """Offer the gradients of those weights that `trained` marks, and add now what is left."""
        if isinstance(offer, WgradStore):
            offer.put(self, trained, pending)
            return
        left = [False] * len(trained)
        # The down-projection first: a backward through two operations would come to it first.
        positions = range(len(trained) - 1, -1, -1)
        for position in positions:
            run = OfferedWgrad(self, position, pending)
            left[position] = trained[position] and not offer(position, run.weight, run)
        if any(left):
            self.add(left, pending)
        for position in positions:
            if left[position]:
                fire_hooks(self.parameters[position])

    def add(self, trained: list[bool], pending: PendingWgrad) -> list[Tensor | None]:
        """Add the gradients of weights that are no inputs of the autograd node to `main_grad`. Returns
        what their `.grad` is to be for the hooks that take it, None where these need none.
        """
        if not all(map(has_main_grad, compress(self.parameters, trained))):
            raise LayoutError(
                "main_grad of an expert weight was removed between the forward and the addition of "
                "its gradient; needed: the attribute, which may be None"
            )
        assert pending.dout is not None
        dout = anchor_of(pending.dout)
        with (
            advising("weight gradients", self.settings),
            self.config.activate(),
            self.sink.alone(dout),
        ):
            batch = self.sink.open(self.engine, self.settings, self.parameters, trained, dout)
            self.sink.add(self.engine, pending, batch)
            return self.sink.close(batch)


class OfferedWgrad:
    """The gradient of one weight, still to be added. It keeps the operands of its backward alive
    until it has run; those of the two weights of a backward are the same tensors.
    """

    def __init__(self, work: WgradWork, position: int, pending: PendingWgrad) -> None:
        """`pending` is copied, because an engine lets go of operands that it has used up."""
        self._work, self._position = work, position
        self._pending: PendingWgrad | None = copy.copy(pending)
        self._read = _borrowed(pending)
        self.weight = work.parameters[position]

    def __call__(self) -> None:
        """Add the gradient to `main_grad` of the weight.

        Raises:
            RuntimeError: it was added already, or x or dout was written or freed since the backward.
            LayoutError: the weight has no `main_grad` any more.
            OutOfMemoryError: nothing was added, and it may be called again.
        """
        if self._pending is None:
            raise RuntimeError(
                f"the gradient of expert weight {self._position} was added before; needed: one run "
                "of each offer"
            )
        self._read.check(_LATE)
        count = len(self._work.parameters)
        trained = [position == self._position for position in range(count)]
        # Another copy, so that a run that found no memory may be repeated.
        self._work.add(trained, copy.copy(self._pending))
        self._pending = None


class WgradStore:
    """The weight gradients of backwards whose schedule asks for them later, all of one backward at a
    time. Each keeps its operands alive until it was run.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[WgradWork, list[bool], PendingWgrad, Borrowed]] = deque()

    def __reduce__(self) -> tuple[type[WgradStore], tuple[()]]:
        """A copy has no backward behind it."""
        return WgradStore, ()

    def put(self, work: WgradWork, trained: Sequence[bool], pending: PendingWgrad) -> None:
        """Keep the gradients of a backward that is over."""
        self._waiting.append((work, list(trained), pending, _borrowed(pending)))

    def run(self) -> None:
        """Add the gradients of the oldest backward that waits, if one does, and give each weight the
        `.grad` that its hooks look for. Running out of memory adds nothing, and it still waits.
        """
        if not self._waiting:
            return
        work, trained, pending, read = self._waiting[0]
        read.check(_LATE)
        # A copy, because an engine lets go of operands that it has used up.
        for weight, gradient in zip(
            work.parameters, work.add(trained, copy.copy(pending)), strict=True
        ):
            if gradient is not None:
                weight.grad = gradient
        self._waiting.popleft()


_LATE = "a backward and the addition of its weight gradients, which was put off"


def _borrowed(pending: PendingWgrad) -> Borrowed:
    """The tokens and the gradient of the output, which are the caller's as a rule."""
    operands = (("x", pending.x), ("dout", pending.dout))
    return Borrowed((name, part) for name, operand in operands for part in _parts(operand))


def _parts(operand: Tokens | None) -> tuple[Tensor, ...]:
    assert operand is not None
    return operand.parts if isinstance(operand, BlockScaledTensor) else (operand,)


def fire_hooks(weight: Tensor) -> None:
    """What Paddle does at the end of a backward for a weight that is an input of its node. PyTorch
    has no such call.
    """
    if requires_grad(weight) and hasattr(weight, "_apply_backward_hook"):
        weight._apply_backward_hook()
