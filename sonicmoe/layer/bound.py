"""`BoundLayer`: what the calls of a layer share until something changes, behind one guard.

    configuration, kind of call, places of the weights, writes to them ──► guard ──► plan, weights

Everything that a call may find changed is named in the guard (docs/design.md, "Stale weights").
Where the guard is that of the last call, its plan and its engine weights hold, and nothing else is
asked. Where it differs, the layer is bound anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..config import ResolvedConfig
from ..engine.interface import Engine
from ..engine.settings import EngineSettings
from ..interop import (
    IS_PADDLE,
    data_ptr,
    device_of,
    grad_enabled,
    is_capturing,
    is_cuda,
    is_recomputed,
)
from ..out_of_memory import advising, raise_with_advice
from ..weights.cache import Binding, PreparedWeights, Reading, lent_by
from ..weights.changes import Traces, announce_change, change_watchers, traces_of
from ..weights.copies import WeightCopies
from ..weights.parameters import ExpertParameters, check_memory
from .plan import OwnPlan, Plan

Tensor = torch.Tensor


class BoundLayer:
    """The plan and the engine weights of one layer that lives from call to call."""

    def __init__(self, parameters: ExpertParameters) -> None:
        """Keep nothing yet: the first forward binds."""
        self._parameters = parameters
        self._prepared = PreparedWeights()
        self._binding: Binding | None = None
        # How many writes somebody announced, and how many of them the engine weights have. The
        # first read is one that nobody need announce.
        self._announced, self._read = 0, -1
        # Where the weights lay at the last read, and the number of that memory, because an allocator
        # hands addresses out again. `_alive` is empty once a part of the memory was freed.
        self._place: tuple[Any, ...] = ()
        self._memories = 0
        self._memory: list[weakref.ref[Any]] = []
        self._alive: list[bool] = []

    def __reduce__(self) -> tuple[type[BoundLayer], tuple[ExpertParameters]]:
        """A copy prepares its own weights: FP8 codes cannot be pickled, and need not be."""
        return BoundLayer, (self._parameters,)

    def bind(
        self,
        own: OwnPlan,
        resolved: ResolvedConfig,
        x: Tensor,
        kind: tuple[Any, ...],
        parameters: Sequence[Tensor],
    ) -> tuple[Plan, Reading]:
        """The plan and the weights of a forward that starts now.

        Args:
            own: of the node that is called; the nodes of one layer share its weights.
            resolved: the configuration in force for it.
            x, kind: as of `OwnPlan.fitted`.
            parameters: read from the layer a moment ago.
        """
        # What decides the plan, and what the weights.
        asked = own, resolved, device_of(x), kind
        bound = self._binding
        plan = bound.plan if bound is not None and bound.guard[0] == asked else None
        if IS_PADDLE:  # whose freed tensors must not be asked where they lie
            check_memory(parameters)
        layout, dtype = self._parameters.layout, parameters[0].dtype
        place, traces = (layout, *map(data_ptr, parameters), dtype), traces_of(parameters)
        guard = asked, place, traces, self._announced, grad_enabled(), is_capturing(x)
        if bound is not None and bound.guard == guard and self._alive:
            reading = bound.again(parameters[0])
            if reading is not None:
                return bound.plan, reading
        plan = plan or own.fitted(x, *kind)
        try:
            reading = self._read_at(plan.chosen, plan.settings, parameters, place, traces)
        except Exception as error:
            raise_with_advice(error, "forward", plan.settings)
            raise
        self._binding = Binding.of(guard, plan, reading)
        return plan, reading

    def bind_copies(
        self,
        own: OwnPlan,
        x: Tensor,
        kind: tuple[Any, ...],
        parameters: Sequence[Tensor],
        copies: WeightCopies,
    ) -> tuple[Plan, Reading]:
        """`bind`, of copies that are read in place of the parameters; of the parameters themselves,
        where the engine computes without an FP8 recipe.
        """
        plan = own.fitted(x, *kind)
        engine, settings = plan.chosen, plan.settings
        with advising("forward", settings):
            if settings.recipe is None:
                return plan, self.read(engine, settings, parameters)
            # Weights that this layer has prepared before would lie beside the copies.
            self.drop()
            return plan, copies.read(engine, settings, self._parameters, parameters)

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor] | None = None,
    ) -> Reading:
        """The weights for a forward that starts now, whatever the last call found.

        Args:
            engine, settings: as in `Engine.refresh`.
            parameters: read from the layer a moment ago, if they were.
        """
        parameters = parameters or self._parameters.parameters()
        if IS_PADDLE:
            check_memory(parameters)
        place = self._parameters.place(parameters)
        return self._read_at(engine, settings, parameters, place, traces_of(parameters))

    def _read_at(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor],
        place: tuple[Any, ...],
        traces: Traces,
    ) -> Reading:
        self._binding, announced = None, self._announced
        # PyTorch gives a weight without memory the address 0. The place needs the addresses
        # anyway, and asking every weight for its memory would take longer than a launch.
        if 0 in place:
            check_memory(parameters)
        reading = self._prepared.read(
            engine,
            settings,
            partial(self._parameters.source, parameters),
            parameters[0],
            self._memory_at(place, parameters),
            traces,
            stale=self._read != announced,
            # PyTorch shows writes. Under Paddle a trainer that has once announced a write announces
            # all, but for one that only evaluates.
            keeps=is_cuda(parameters[0]) and (not IS_PADDLE or (announced > 0 and grad_enabled())),
            alone=not grad_enabled() or is_recomputed(),
        )
        # Last, because a read that raised has not used up the announcement.
        self._read = announced
        if reading.weights.store is None and grad_enabled():
            reading.lent, reading.weights = lent_by(parameters, reading.weights, traces.versions)
        return reading

    def _memory_at(self, place: tuple[Any, ...], parameters: Sequence[Tensor]) -> tuple[Any, ...]:
        """The place and the number of its memory. Other memory may lie at the same addresses where the
        user replaces a `.data`, or computes the weights in every forward.
        """
        if place != self._place or not self._alive:
            self._place, self._memories = place, self._memories + 1
            self._memory, self._alive = [], [True]
            if not IS_PADDLE:  # which prepares again unless a trainer announces all writes
                alive = self._alive
                held = {id(each): each for each in map(torch.Tensor.untyped_storage, parameters)}
                # By callbacks, because a node may have hundreds of weights, and a forward that asked
                # each of them would take longer than a launch.
                self._memory = [
                    weakref.ref(each, lambda _: alive.clear()) for each in held.values()
                ]
        return *place, self._memories

    def invalidate(self, event: str = "invalidate_caches() announced a write") -> None:
        """Have the next forward make the engine weights again, and no forward read copies that were
        made before. `event`: the announcement, in words for a message.
        """
        self._announced += 1
        # Usually nobody holds copies, and listing the parameters of many experts takes a while.
        if change_watchers:
            announce_change(self._parameters.parameters(), event)

    def drop(self) -> None:
        """Free the engine weights; the next forward makes them again."""
        self._binding, self._prepared, self._read = None, PreparedWeights(), -1
