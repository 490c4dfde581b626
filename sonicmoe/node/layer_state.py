"""The state of a node between calls: one object that the node, its calls and diagnosis share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..engine.interface import Engine, EngineSettings
from ..enums import FlushMode
from ..gradients.routes import Addition, Route
from ..gradients.store import GradientStore
from ..interop import requires_grad
from ..observe import NODE
from ..weights.cache import LayerWeights, Reading, Unannounced
from ..weights.copies import WeightCopies
from ..weights.parameters import ExpertParameters
from .step_guard import StepGuard
from .unread_gradients import UnreadGradients
from .wgrad_queue import WgradQueue

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")


class WgradOffer(Protocol):
    """Asked once per weight and backward whether it takes the addition of that weight's gradient
    (`wgrad_offer`).
    """

    def __call__(self, position: int, weight: Tensor, run: Callable[[], None]) -> bool:
        """`position` of the weight among the layer's parameters; `run` adds the gradient, and is to
        be called once by whoever returns True.
        """
        ...


class LayerState:
    """The user's parameters, the engine weights made of them, the gradients on their way to them,
    and the guard over both. Holds no activation, and no memory before the first call.

    wgrad_queue: takes weight gradients that are put off; None where nothing is.
    offers: gives the one to whom each weight's gradient is offered, if there is one now.
    face: a key of `observe.FACES`, for those who observe the calls.
    """

    def __init__(self, parameters: ExpertParameters, flush: FlushMode, split_wgrad: bool) -> None:
        """Wrap the parameters; reads and allocates nothing."""
        self.parameters, self.flush_mode = parameters, flush
        self.num_experts = parameters.native_shapes()[0][0]
        self.weights = LayerWeights(parameters)
        # Weight gradients that are put off can go nowhere before step(): hooks, reductions and
        # clearing all come before they exist.
        mode = FlushMode.STEP if split_wgrad else flush
        self.gradients = GradientStore(parameters, mode)
        # PaddleFleet calls no `step()`, and its callback announces what the optimizer wrote.
        self.guard = StepGuard(asks=flush is not FlushMode.PROMPT)
        self._unread = UnreadGradients(asks=flush is not FlushMode.PROMPT)
        self._said_dropped = self._said_rebuilt = False
        self.wgrad_queue = WgradQueue() if split_wgrad else None
        self.offers: Callable[[], WgradOffer | None] | None = None
        self._said_not_offered = False
        self.face = NODE

    def read_weights(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor] | None = None,
        copies: WeightCopies | None = None,
    ) -> Reading:
        """As `LayerWeights.read`; says so where weights were written and nobody announced it."""
        reading = self.weights.read(engine, settings, parameters, copies)
        if reading.unannounced is not None:
            # With gradients waiting, a changed weight means that an optimizer ran without them,
            # which the guard warns about. With none waiting it is harmless: the weights were
            # prepared again. A mere optimizer step is then not worth a line, because it may belong
            # to another model.
            if self.gradients.waiting:
                self.guard.note_write(reading.unannounced)
            elif reading.unannounced is Unannounced.WRITE and not self._said_rebuilt:
                # A loop without step() would say so in every step.
                self._said_rebuilt = True
                logger.info(
                    "expert weights changed without step() or invalidate_caches(); caches rebuilt. Said once."
                )
        return reading

    def offer_for(self, parameters: Sequence[Tensor], runs_without: bool) -> WgradOffer | None:
        """To whom a call offers its weight gradients; None: they are complete when the backward
        returns, and the weights are inputs of its autograd node.

        runs_without: the backward runs also where the weights are no inputs of an autograd node.
        """
        offer = None if self.offers is None else self.offers()
        if offer is None or not runs_without:
            return None
        trained = filter(requires_grad, parameters)
        if all(hasattr(parameter, "main_grad") for parameter in trained):
            return offer
        if not self._said_not_offered:
            self._said_not_offered = True
            logger.warning(
                "expert weight gradients are not put off, because a weight that trains has no main_grad to add them to later"
            )
        return None

    def begin_backward(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor],
        trained: list[bool],
        dout: Tensor,
    ) -> Addition:
        """Decide where a backward adds its gradients; see `GradientStore.begin`. Gradients that
        waited so far are dropped where their batch was, and handed over where they are for other
        parameters.
        """
        self._unread.begin_backward(parameters, trained)
        if self.gradients.waiting:
            if self.guard.saw_clearing(self.gradients.owners):
                self._drop()
            elif not self.gradients.waits_for(parameters, trained):
                self.finish_wgrad()
                self.flush()
        return self.gradients.begin(engine, settings, parameters, trained, dout)

    def end_backward(self, addition: Addition, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """A backward has added its gradients, or put them off. Returns those that autograd is to
        accumulate, one entry per parameter.
        """
        returned = self.gradients.end(addition)
        self.note_backward()
        # Only gradients that stay in the node can be missed by a reduction.
        if addition.route is Route.WAIT:
            self.guard.watch(parameters)
        return returned

    def note_backward(self) -> None:
        """A backward ran; for the guard over writes that nobody announces."""
        self.guard.count_backward(self.gradients.waiting, self.weights.sees_writes)

    def finish_wgrad(self) -> None:
        """Have every weight gradient that was put off added: now, or on a GPU in stream order."""
        if self.wgrad_queue is not None:
            self.wgrad_queue.finish()

    def flush(self) -> None:
        """Hand what waits to the parameters; what was put off must have been finished before."""
        if self.gradients.waiting:
            parameters = self.gradients.owners
            if self.guard.saw_removal(parameters):
                self._drop()
            else:
                # Before the flush, which itself writes the gradients that the guard compares.
                self.guard.check(parameters)
        self.gradients.flush()

    def end_step(self) -> None:
        """The parameters have their gradients, and an optimizer is about to write the weights."""
        self.guard.end_step()
        self._unread.end_step(self.weights.marks)
        self.invalidate("node.step() announced an optimizer step")

    def invalidate(self, event: str = "invalidate_caches() announced a write") -> None:
        """Have the next forward prepare the weights again, from this `event` on."""
        self.weights.invalidate(event)
        self.guard.note_announcement()

    def discard(self) -> None:
        """Drop every gradient that waits, here or in the queue."""
        if self.wgrad_queue is not None:
            # First, because additions that still run on the side stream must not follow the
            # zeroing.
            self.wgrad_queue.discard()
        self.gradients.discard()
        self.guard.forget()

    def _drop(self) -> None:
        """The batch of what waits was dropped by clearing its gradients, so it is dropped here."""
        waiting = self.gradients.waiting
        self.discard()
        if not self._said_dropped:
            self._said_dropped = True
            logger.warning(
                "weight gradients of %d backward(s) that waited in the node were dropped, because the gradients of the "
                "expert weights were cleared after them and before node.step(); to skip a batch, call "
                "node.discard_grads(). Said once.",
                waiting,
            )

    def release(self) -> None:
        """Free the gradients' memory.

        Raises:
            RuntimeError: gradients wait that were not flushed.
        """
        # The side stream may still add into the memory that is about to be freed.
        self.finish_wgrad()
        self.gradients.release()
