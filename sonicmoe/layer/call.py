"""One call of a layer of experts: its forward, and the backwards through it. Every face ends here.

    routes, probs ──► route ──► compute ──► out, Saved         weights: `Reading`, of `weights/`
                                   dout ──► differentiate ──► dx, dprobs, gradients

`NodeCall` is a call of a layer that lives: a node, PaddleFleet's layer, Megatron-Core's experts.
`PassedCall` is one of a layer that lives for this call alone: its weights come with it, as those of
the functional API, `MoE`, transformers, torchtitan and the operators of compiled graphs do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engine.interface import EngineWeights, Saved, Tokens
from ..observe import (
    FACES,
    BackwardBegins,
    BackwardDone,
    ExpertCall,
    ForwardDone,
    emit,
    is_awaited,
)
from ..quant.tokens import anchor_of
from ..routing.build import build_routing, build_sorted_routing
from ..routing.ids import ids_of_sorted
from ..routing.metadata import RoutingMetadata
from ..weights.cache import Reading
from .plan import Plan

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor
Named = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(eq=False, kw_only=True)
class LayerCall(ABC):
    """The arguments of one call, and how its backward adds gradients. It holds no activation.

    plan: fitted to the call.
    routes: int `[T, K]`, ids of experts; or the counts `[E]` of rows in expert order; None where the
        routing that was made of them stands for them.
    is_sorted: the tokens come in expert order.
    tokens_per_expert: as of `build_routing`; None where the host does not know them.
    is_checked: a border has checked ids and probabilities.
    static_rows: as of `build_routing`.
    reading: the engine weights as the forward read them, which keeps them alive until the last
        backward; None where they are read later.
    """

    plan: Plan
    routes: Tensor | None
    is_sorted: bool = False
    tokens_per_expert: Any = None
    is_checked: bool = False
    static_rows: bool = False
    reading: Reading | None = None

    def route(self, rows: int, probs: Tensor | None, experts: int) -> RoutingMetadata:
        """The routing of T tokens to E experts, whose messages name the face's arguments. probs: None
        where the caller multiplies rows in expert order himself.
        """
        routes, alignment = self.routes, self.plan.settings.row_alignment
        assert routes is not None
        how: Any = {"validate": self.plan.validate, "static_rows": self.static_rows}
        counts = self.tokens_per_expert
        if self.is_sorted:
            return build_sorted_routing(routes, rows, probs, counts, alignment=alignment, **how)
        assert probs is not None
        face = FACES[self.plan.face]
        return build_routing(
            *(routes, probs, experts, counts),
            alignment=alignment,
            names=(face.indices, face.scores),
            is_checked=self.is_checked,
            **how,
        )

    def compute(
        self, x: Tokens, probs: Tensor | None, routing: RoutingMetadata, save: bool
    ) -> tuple[Tensor, Saved | None]:
        """The output `[T, H]`, and what a backward needs."""
        plan = self.plan
        out, saved = plan.chosen.forward(x, routing, self._weights(), plan.settings, save=save)
        # Asked before the event is built: a run without observers pays one read of a global.
        if is_awaited():
            rows = int(out.shape[0])
            if probs is None:
                probs = torch.ones([rows], dtype=torch.float32, device=out.device)
            probs = probs.reshape([rows, 1]) if self.is_sorted else probs
            emit(ForwardDone(self._described(rows), x, probs, out, saved))
        return out, saved

    def differentiate(
        self, dout: Tokens, saved: Saved, trained: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Any]:
        """`(dx [T, H], dprobs, gradients)`; trained: which parameters want a gradient. The caller has
        activated the plan's configuration, and found `reading` current.
        """
        if is_watched := is_awaited():
            described = self._described(int(anchor_of(dout).shape[0]))
            emit(BackwardBegins(described, dout, saved))
        dx, dprobs, gradients = self._gradients(dout, saved, trained)
        if is_watched:
            # Bound and not called: the observer decides whether to look at gradients.
            emit(BackwardDone(described, dx, dprobs, self._left(gradients)))
        return dx, dprobs, gradients

    @abstractmethod
    def _gradients(
        self, dout: Tokens, saved: Saved, trained: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Any]:
        """`differentiate` without its events."""

    @abstractmethod
    def _weights(self) -> EngineWeights:
        """The engine's, with the biases and the adapters of this call."""

    @abstractmethod
    def _left(self, gradients: Any) -> Named:
        """The weight gradients of a backward, by name, wherever it left them."""

    @abstractmethod
    def _native(self) -> NativeWeights:
        """`ExpertCall.native_weights`."""

    @abstractmethod
    def _told(self) -> Mapping[str, Any]:
        """The fields of `ExpertCall` that say whose call it is."""

    def _described(self, rows: int) -> ExpertCall:
        assert self.reading is not None
        routes, plan = self.routes, self.plan
        if routes is not None and self.is_sorted:
            routes = ids_of_sorted(routes, rows)
        # Bound and not called: an observer that looks at no weight pays for no copy.
        about = plan.chosen.name, plan.settings, routes, self._native, self.reading.values
        return ExpertCall(*about, face=plan.face, **self._told())
