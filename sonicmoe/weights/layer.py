"""The engine weights of one node's layer, from one forward to the next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..engine.interface import Engine
from ..engine.settings import EngineSettings
from ..interop import IS_PADDLE, grad_enabled, is_cuda, is_recomputed
from .cache import PreparedWeights, Reading
from .changes import announce_change, change_watchers, traces_of
from .copies import WeightCopies
from .lent import lent_by
from .parameters import ExpertParameters, check_memory

Tensor = torch.Tensor


class LayerWeights:
    """The engine weights of one node, made at the events of docs/design.md, "Stale weights"."""

    def __init__(self, parameters: ExpertParameters) -> None:
        """Keep nothing yet: the first forward reads the weights."""
        self._parameters = parameters
        self._prepared = PreparedWeights()
        # Of the writes that somebody announced: whether one is still to be read, and whether any
        # ever came.
        self._stale, self._announced = True, False

    def __reduce__(self) -> tuple[type[LayerWeights], tuple[ExpertParameters]]:
        """A copy prepares its own weights: FP8 codes cannot be pickled, and need not be."""
        return LayerWeights, (self._parameters,)

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor] | None = None,
        copies: WeightCopies | None = None,
    ) -> Reading:
        """The weights for a forward that starts now.

        Args:
            engine, settings: as in `Engine.refresh`.
            parameters: read from the layer a moment ago, if they were.
            copies: what to read in place of the parameters, where the settings have an FP8 recipe.
        """
        parameters = parameters or self._parameters.parameters()
        if copies is not None and settings.recipe is not None:
            # Weights that this layer has prepared before would lie beside the copies.
            self.drop()
            return copies.read(engine, settings, self._parameters, parameters)
        if IS_PADDLE:
            check_memory(parameters)
        place = self._parameters.place(parameters)
        # PyTorch gives a weight without memory the address 0. The place needs the addresses
        # anyway, and asking every weight for its memory would take longer than a launch.
        if 0 in place:
            check_memory(parameters)
        source, traces = partial(self._parameters.source, parameters), traces_of(parameters)
        reading = self._prepared.read(
            engine,
            settings,
            source,
            parameters[0],
            place,
            traces,
            stale=self._stale,
            # PyTorch shows writes. Under Paddle a trainer that has once announced a write announces
            # all, but for one that only evaluates.
            keeps=is_cuda(parameters[0])
            and (not IS_PADDLE or (self._announced and grad_enabled())),
            alone=not grad_enabled() or is_recomputed(),
        )
        # Last, because a read that raised has not used up the announcement.
        self._stale = False
        if reading.weights.store is None and grad_enabled():
            given = parameters, reading.weights, traces.versions
            reading.lent, reading.weights = lent_by(*given)
        return reading

    def invalidate(self, event: str = "invalidate_caches() announced a write") -> None:
        """Have the next forward make the engine weights again, and no forward read copies that were
        made before. `event`: the announcement, in words for a message.
        """
        self._stale = self._announced = True
        # Usually nobody holds copies, and listing the parameters of many experts takes a while.
        if change_watchers:
            announce_change(self._parameters.parameters(), event)

    def drop(self) -> None:
        """Free the engine weights; the next forward makes them again."""
        self._prepared, self._stale = PreparedWeights(), True
