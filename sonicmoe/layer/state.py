"""The state of a node between calls: one object that the node, its calls and diagnosis share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from ..enums import FlushMode, member_of
from ..errors import ConfigError, expect
from ..gradients.batch import GradientBatch, has_main_grad
from ..gradients.sink import GradientSink
from ..interop import grad_enabled, requires_grad
from ..log import log_once
from ..observe import NODE
from ..refusals import need_type
from ..routing.metadata import RoutingMetadata
from ..weights.changes import OPTIMIZER_STEPPED, change_watchers
from ..weights.parameters import ExpertParameters
from .bound import BoundLayer
from .late_wgrad import WgradOffer, WgradStore
from .questions import Questions

Tensor = torch.Tensor


class LayerState:
    """The user's parameters, the engine weights made of them, and the gradients on their way to
    them. Holds no activation, and no memory before the first call.

    sizes: E, H and I.
    offers: gives the one to whom each weight's gradient is offered, if there is one now.
    face: a key of `observe.FACES`, for those who observe the calls.
    questions: what is asked of a loop that looks wrong.
    """

    def __init__(
        self,
        parameters: ExpertParameters,
        flush: FlushMode | str = FlushMode.AUTO,
        idle_grads: bool = True,
    ) -> None:
        """Wrap the parameters, and check the others; reads and allocates nothing."""
        way = member_of(FlushMode, flush, "flush")
        need_type("idle_grads", idle_grads, bool, "True or False", ConfigError)
        words = "idle_grads is False and gradients wait for step(), which adds all of them"
        expect(
            idle_grads or way is not FlushMode.STEP, ConfigError, f"{words}; needed: flush='auto'"
        )
        self.idle_grads = idle_grads
        self.parameters = parameters
        (experts, _, hidden), (_, _, inner) = parameters.native_shapes
        self.sizes = experts, hidden, inner
        self.bound = BoundLayer(parameters)
        self.gradients = GradientSink(parameters, way)
        self.offers: Callable[[], WgradOffer | WgradStore | None] | None = None
        self.face = NODE
        self.questions = Questions()

    def note_backward(self, batch: GradientBatch) -> None:
        """One begins, whose gradients wait, or whose traces Paddle does not show."""
        waiting = self.gradients.waiting
        if waiting == 1:
            change_watchers.add(self)
        self.questions.at_backward(batch, waiting)

    def of_busy(
        self,
        gradients: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        routing: RoutingMetadata,
    ) -> list[Tensor | None]:
        """The gradients, with None for weights whose experts have no row in `routing`."""
        rows = routing.host_counts or routing.expert_counts.tolist()  # waits for a GPU
        # Experts may share a parameter, whose gradient is then the sum of theirs.
        experts = len(rows)
        busy = {id(weight) for index, weight in enumerate(parameters) if rows[index % experts]}
        pairs = zip(gradients, parameters, strict=True)
        return [gradient if id(weight) in busy else None for gradient, weight in pairs]

    def offer_for(
        self, parameters: Sequence[Tensor], runs_without: bool
    ) -> WgradOffer | WgradStore | None:
        """To whom a call offers its weight gradients; None: they are complete when the backward
        returns, and the weights are inputs of its autograd node.

        runs_without: the backward runs also where the weights are no inputs of an autograd node.
        """
        offer = None if self.offers is None else self.offers()
        if offer is None or not runs_without or not grad_enabled():
            return None
        trained = filter(requires_grad, parameters)
        if all(map(has_main_grad, trained)):
            return offer
        log_once(
            logging.WARNING,
            "expert weight gradients are not put off, because a weight that trains has no main_grad "
            "to add them to later",
        )
        return None

    def note_change(self, written: set[int], event: str) -> None:
        """Somebody has written weights with these ids (`weights.changes`)."""
        waiting = self.gradients.waiting if event == OPTIMIZER_STEPPED else 0
        if waiting and not written.isdisjoint(map(id, self.parameters.parameters())):
            self.questions.at_optimizer(waiting)

    def trained(self) -> Iterator[Tensor]:
        """The parameters that want a gradient, looked up when the first is asked for."""
        yield from filter(requires_grad, self.parameters.parameters())
