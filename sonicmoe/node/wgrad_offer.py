"""Weight gradients that a schedule may add later, one weight at a time.

A schedule is offered the addition of each weight's gradient (`WgradOffer`). Where it takes it, it
runs it when it likes, in a pipeline bubble for example, and fires the weight's backward hooks after
that. A framework fires the hooks of every weight that is an input of an autograd node when the
backward of that node ends, which would be too early. So a call whose gradients are offered does not
take its weights as inputs, and the hooks of weights that the schedule leaves here are fired here.

    backward ── offer(down) ──► taken: the schedule runs it, then fires the hooks
             └─ offer(up) ────► left:  added now, then the hooks are fired here

The destination of a gradient is looked up when it is added: by then `main_grad` may be another
tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..config import SonicMoEConfig
from ..engine.interface import Engine, EngineSettings, PendingWgrad
from ..errors import LayoutError, expect
from ..interop import requires_grad
from ..out_of_memory import raise_with_advice
from ..quant.tokens import anchor_of
from .layer_state import LayerState, WgradOffer

Tensor = torch.Tensor


class WgradWork(NamedTuple):
    """What an addition needs besides its operands: no activation, and not the engine weights."""

    state: LayerState
    config: SonicMoEConfig
    engine: Engine
    settings: EngineSettings
    parameters: Sequence[Tensor]

    def offer(self, offer: WgradOffer, trained: Sequence[bool], pending: PendingWgrad) -> None:
        """Offer the gradients of those weights that `trained` marks, and add now what is left."""
        self.state.note_backward()
        left = [False] * len(trained)
        # The down-projection first: a backward through two operations would come to it first.
        for position in reversed(range(len(trained))):
            run = OneWeight(self, position, pending)
            if trained[position] and not offer(position, run.weight, run):
                left[position] = True
        if any(left):
            self.add(left, pending)
        for position in reversed(range(len(trained))):
            if left[position]:
                fire_hooks(self.parameters[position])

    def add(self, trained: list[bool], pending: PendingWgrad) -> None:
        """Add the gradients of weights that are no inputs of the autograd node to `main_grad`."""
        for parameter, wanted in zip(self.parameters, trained, strict=True):
            expect(
                not wanted or hasattr(parameter, "main_grad"),
                LayoutError,
                "main_grad of an expert weight was removed between the forward and the addition of its gradient; needed: the "
                "attribute, which may be None",
            )
        assert pending.dout is not None
        dout, state = anchor_of(pending.dout), self.state
        try:
            with self.config.activate(), state.gradients.alone(dout):
                addition = state.begin_backward(
                    self.engine, self.settings, self.parameters, trained, dout
                )
                state.gradients.add(self.engine, pending, addition)
                state.gradients.end(addition)
        except Exception as error:
            raise_with_advice(error, "weight gradients", self.settings)
            raise


class OneWeight:
    """The gradient of one weight, still to be added. It keeps the operands of its backward alive
    until it has run; those of the two weights of a backward are the same tensors.
    """

    def __init__(self, work: WgradWork, position: int, pending: PendingWgrad) -> None:
        """`pending` is copied, because an engine lets go of operands that it has used up."""
        self._work, self._position = work, position
        self._pending: PendingWgrad | None = copy.copy(pending)
        self.weight = work.parameters[position]

    def __call__(self) -> None:
        """Add the gradient to `main_grad` of the weight.

        Raises:
            RuntimeError: it was added already.
            LayoutError: the weight has no `main_grad` any more.
            OutOfMemoryError: nothing was added, and it may be called again.
        """
        if self._pending is None:
            raise RuntimeError(
                f"the gradient of expert weight {self._position} was added before; needed: one run of each offer"
            )
        count = len(self._work.parameters)
        trained = [position == self._position for position in range(count)]
        # Another copy, so that a run that found no memory may be repeated.
        self._work.add(trained, copy.copy(self._pending))
        self._pending = None


def fire_hooks(weight: Tensor) -> None:
    """What Paddle does at the end of a backward for a weight that is an input of its node. PyTorch
    has no such call.
    """
    if requires_grad(weight) and hasattr(weight, "_apply_backward_hook"):
        weight._apply_backward_hook()
