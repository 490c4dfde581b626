"""Engine weights, kept from one forward to the next until the user's weights change.

    source, traces ──► PreparedWeights.read ──► Reading ──► forward ──► backward: check_current()

The node and the functional API are told of writes by different events, and their weights live for
different times. `LayerWeights` serves the node: it lives as long as its layer, and `step()` tells
it of optimizer steps. `stacked_cache` serves the functional API: it finds what was prepared of a
parameter by weak references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..engine.interface import Engine, EngineWeights
from ..engine.settings import EngineSettings
from ..interop import IS_PADDLE, data_ptr, grad_enabled, holds_memory, is_cuda, plain_ops
from ..layouts import WeightSource
from ..quant.format import BlockScaledTensor
from ..quant.reference import dequantize
from ..stream_order import StreamOrder
from .changes import Traces, announce_change, change_watchers, traces_of, versions_of
from .parameters import ExpertParameters, check_memory

Tensor = torch.Tensor


@dataclass(eq=False, slots=True)
class Reading:
    """Engine weights as one forward read them; its backward asks `check_current` before it reads
    them again.

    prepared: keeps the weights for later forwards; None where they are this call's own.
    writes: how many writes to the user's weights `prepared` had seen then.
    lent: those of the weights that are the user's own memory, and their versions then. Native
        weights that need no conversion are.
    """

    weights: EngineWeights
    prepared: PreparedWeights | None = None
    writes: int = 0
    lent: tuple[list[Tensor], tuple[int, ...]] | None = None

    def check_current(self) -> None:
        """Raise if the weights are no longer those that the forward read.

        Raises:
            RuntimeError: a later forward has written changed weights into these buffers; or the
                engine reads the user's memory, and that was written or freed.
        """
        self._check_lent()
        # An engine that made new weights has left these alone. An engine that updates in place
        # returned the same object again, and then only the number of writes tells whether it
        # overwrote them.
        prepared = self.prepared
        if prepared is None or prepared.weights is not self.weights:
            return
        if prepared.writes != self.writes:
            raise RuntimeError(
                "the expert weights were modified by an inplace operation, and read by another "
                "forward, between this forward and its backward; its gradients would mix old "
                "activations with new weights. Finish every backward before the weights change"
            )

    def values(self) -> tuple[Tensor, Tensor]:
        """Native weights, `w1 [E, N1, H]` and `w2 [E, H, I]`, as the engine's codes stand for them,
        in fp32; for those who inspect a call whose parameters hold no memory.
        """
        # Backward's pair is there to the end, and its shapes are those of the native matrices.
        held = self.weights.w1_dgrad, self.weights.w2_dgrad
        with plain_ops():
            w1, w2 = (
                dequantize(w) if isinstance(w, BlockScaledTensor) else w.to(torch.float32)
                for w in held
            )
        return w1, w2

    def _check_lent(self) -> None:
        if self.lent is None:
            return
        tensors, versions = self.lent
        freed = not all(map(holds_memory, tensors))
        if freed or versions_of(tensors) != versions:
            raise RuntimeError(
                f"the expert weights were {'freed' if freed else 'modified by an inplace operation'} between this forward and "
                "its backward, which reads them where they lie; its gradients would be wrong. Finish every backward before the "
                "weights change"
            )


class PreparedWeights:
    """The engine weights of one set of parameters.

    weights: what a later `read` may bring up to date; None before the first, and where nothing is
        kept.
    writes: how many of the writes to the parameters showed on the host.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self.weights: EngineWeights | None = None
        self.writes = 0
        self._key: tuple[Any, ...] | None = None
        self._traces = Traces()
        self._streams = StreamOrder()

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        source: Callable[[], WeightSource],
        anchor: Tensor,
        place: tuple[Any, ...],
        traces: Traces,
        *,
        stale: bool = False,
        keeps: bool = False,
    ) -> Reading:
        """The weights for a forward that starts now.

        Args:
            engine, settings: as in `Engine.refresh`.
            source: gives what `Engine.refresh` takes; called only where an engine needs it.
            anchor: a tensor that lies where the weights lie.
            place: where the weights lie. Weights at another place, another engine and other
                settings get engine weights of their own, because an outstanding forward may still
                have to read the old ones in its backward.
            traces: what the host sees of writes now.
            stale: somebody has announced a write.
            keeps: every write shows in `traces`, or is announced, so that weights are kept also for
                an engine that does not look at the device.
        """
        key = (engine.name, settings.of_weights, place)
        held = self.weights if key == self._key else None
        if held is not None and not (keeps or held.updated_in_place):
            held = None
        written = held is not None and traces.versions != self._traces.versions
        changed = held is None or stale or traces != self._traces
        # A forward on another stream must wait for the launches that made what it reads.
        self._streams.enter(anchor)
        try:
            if held is None or changed or not engine.keep(held):
                # Views of the parameters are no part of the caller's graph.
                with plain_ops():
                    held = engine.refresh(source(), settings, held, changed)
        finally:
            # Recorded after `refresh`, so that a later forward on another stream waits for these
            # launches, also where one of them failed.
            self._streams.leave()
        # `traces` are from before `refresh` read the weights. A write in between is therefore found
        # by the next forward, and never lost.
        self._key, self._traces = key, traces
        self.weights = held if keeps or held.updated_in_place else None
        # Steps of optimizers are not counted: the step of another model must not make an
        # outstanding backward fail.
        self.writes += written
        return Reading(held, self, self.writes)

    def lend(self) -> None:
        """A forward that starts now reads the weights as they are, without their source."""
        assert self.weights is not None
        held = self.weights.w2_dgrad
        anchor = held.bytes if isinstance(held, BlockScaledTensor) else held
        self._streams.enter(anchor)
        self._streams.leave()


class HeldCopies(Protocol):
    """Engine weights that the caller holds: `copies.WeightCopies`."""

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        layer: ExpertParameters,
        parameters: Sequence[Tensor],
    ) -> Reading: ...


class LayerWeights:
    """The engine weights of one node, made at the events of docs/design.md, "Stale weights"."""

    def __init__(self, parameters: ExpertParameters) -> None:
        """Reads nothing."""
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
        copies: HeldCopies | None = None,
    ) -> Reading:
        """The weights for a forward that starts now.

        Args:
            engine, settings: as in `Engine.refresh`.
            parameters: read from the layer a moment ago, if they were.
            copies: what to read in place of the parameters, where the settings have an FP8 recipe.

        Raises:
            LayoutError: the framework has freed the memory of a weight, and it is to be read.
            StaleWeightsError, ConfigError: see `WeightCopies.read`.
        """
        parameters = parameters or self._parameters.parameters()
        if copies is not None and settings.recipe is not None:
            # Weights that this layer has prepared before would lie beside the copies.
            self.drop()
            return copies.read(engine, settings, self._parameters, parameters)
        if IS_PADDLE:
            check_memory(parameters)
        # A parameter that changes its layout in place keeps its addresses.
        place = self._parameters.layout, *map(data_ptr, parameters), parameters[0].dtype
        # PyTorch gives a weight without memory the address 0. The place needs the addresses
        # anyway, and asking every weight for its memory would take longer than a launch.
        if 0 in place:
            check_memory(parameters)
        source = partial(self._parameters.source, parameters)
        reading = self._prepared.read(
            engine,
            settings,
            source,
            parameters[0],
            place,
            traces_of(parameters),
            stale=self._stale,
            keeps=is_cuda(parameters[0]) and self._every_write_is_told(),
        )
        # Last, because a read that raised has not used up the announcement.
        self._stale = False
        lent = _lent(reading.weights, parameters) if grad_enabled() else []
        if lent and is_cuda(lent[0]):
            reading.lent = lent, versions_of(lent)
        elif lent:
            reading.weights = _copied(reading.weights)
        return reading

    def _every_write_is_told(self) -> bool:
        """PyTorch shows writes. Under Paddle a trainer that has once announced a write announces
        all, but for one that only evaluates.
        """
        return not IS_PADDLE or (self._announced and grad_enabled())

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


def _copied(weights: EngineWeights) -> EngineWeights:
    """In memory of their own. A host does that for a training forward, because nothing there shows
    a write between it and its backward.
    """
    with plain_ops():
        w1, w2 = (w.clone() for w in (weights.w1, weights.w2) if isinstance(w, torch.Tensor))
    return EngineWeights(w1, w2, w1, w2)


def _lent(weights: EngineWeights, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those of the engine's weights that begin where the first up- or down-projection lies."""
    # Block-scaled weights are memory of the engine's own.
    plain = [w for w in (weights.w1, weights.w2) if isinstance(w, torch.Tensor)]
    firsts = {data_ptr(parameters[0]), data_ptr(parameters[len(parameters) // 2])} if plain else ()
    return [w for w in plain if data_ptr(w) in firsts]
