"""Engine weights, kept from one forward to the next until the user's weights change.

    source, seen ──► WeightCache.read ──► Reading ──► forward ──► backward: check_current()

The node and the functional API see different traces of a write, and their caches live for different
times. `LayerWeights` serves the node: it lives as long as its layer, and `step()` tells it of
optimizer steps. `stacked_cache` serves the functional API: it finds the cache of a parameter by
weak references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch

from ..engine.interface import Change, Engine, EngineSettings, EngineWeights
from ..interop import IS_PADDLE, data_ptr, grad_enabled, holds_memory, plain_ops
from ..layouts import WeightSource
from ..quant.format import BlockScaledTensor
from ..quant.reference import dequantize
from ..stream_order import StreamOrder
from .changes import Seen, announce_change, change_watchers, look
from .parameters import ExpertParameters, check_memory

Tensor = torch.Tensor


class Unannounced(Enum):
    """A write that no `step()` or `invalidate_caches()` announced, in words for a log line."""

    WRITE = "expert weights changed"
    OPTIMIZER_STEP = "an optimizer stepped"


@dataclass(eq=False, slots=True)
class Reading:
    """Engine weights as one forward read them; its backward asks `check_current` before it reads
    them again.

    cache: keeps the weights for later forwards; None where they are this call's own.
    writes: how many writes to the user's weights `cache` had seen then.
    unannounced: the write that was found, if one was.
    lent: those of the weights that are the user's own memory, and the marks they had then. Native
        weights that need no conversion are.
    """

    weights: EngineWeights
    cache: WeightCache | None = None
    writes: int = 0
    unannounced: Unannounced | None = None
    lent: tuple[list[Tensor], tuple[int | None, ...]] | None = None

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
        cache = self.cache
        if cache is None or cache.weights is not self.weights or cache.writes == self.writes:
            return
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
        tensors, marks = self.lent
        freed = not all(map(holds_memory, tensors))
        if freed or look(tensors).marks != marks:
            raise RuntimeError(
                f"the expert weights were {'freed' if freed else 'modified by an inplace operation'} between this forward and "
                "its backward, which reads them where they lie; its gradients would be wrong. Finish every backward before the "
                "weights change"
            )


class WeightCache:
    """The engine weights of one set of parameters.

    weights: what the engine made at the last `read`, None before the first.
    writes: how many of the writes to the parameters showed on the host.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self.weights: EngineWeights | None = None
        self.writes = 0
        self._place: tuple[Any, ...] | None = None
        self._seen = Seen((), 0)
        self._streams = StreamOrder()

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        source: Callable[[], WeightSource],
        anchor: Tensor,
        place: tuple[Any, ...],
        seen: Seen,
        told: Change = Change.NO,
    ) -> Reading:
        """The weights for a forward that starts now.

        Args:
            engine, settings: as in `Engine.refresh`.
            source: gives what `Engine.refresh` takes; called only where an engine needs it.
            anchor: a tensor that lies where the weights lie.
            place: where the weights lie. Weights at another place, another engine and other
                settings get engine weights of their own, because an outstanding forward may still
                have to read the old ones in its backward.
            seen: what the host sees of the weights now.
            told: what the caller knows beside that.
        """
        # `previous` is an offer to update in place. It is made only where the new weights may
        # replace the old ones for every reader.
        key = (engine.name, settings.of_weights, place)
        previous = self.weights if key == self._place else None
        # Checksums and version counters prove a write. An optimizer step only makes one likely,
        # because the step may belong to another model.
        written = previous is not None and seen.marks != self._seen.marks
        stepped = previous is not None and seen.optimizer_steps != self._seen.optimizer_steps
        change = Change.YES if previous is None or written or stepped else told
        # A forward on another stream must wait for the launches that made what it reads.
        self._streams.enter(anchor)
        try:
            if previous is None or change is Change.YES or not engine.keep(previous, change):
                # Views of the parameters are no part of the caller's graph.
                with plain_ops():
                    self.weights = engine.refresh(source(), settings, previous, change)
        finally:
            # Recorded after `refresh`, so that a later forward on another stream waits for these
            # launches, also where one of them failed.
            self._streams.leave()
        # `seen` was taken before `refresh` read the weights. A write in between is therefore found
        # by the next forward, and never lost.
        self._place, self._seen = key, seen
        # Steps are not counted: the step of another model must not make an outstanding backward
        # fail.
        self.writes += written
        unannounced = None
        if told is not Change.YES and (written or stepped):
            unannounced = Unannounced.WRITE if written else Unannounced.OPTIMIZER_STEP
        assert self.weights is not None
        return Reading(self.weights, self, self.writes, unannounced)

    @property
    def marks(self) -> tuple[int | None, ...]:
        """Of the weights as the last `read` found them; empty before the first."""
        return self._seen.marks

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
    """The engine weights of one node, made once per optimizer step.

    `step()` and `invalidate_caches()` announce writes. Writes that nobody announced are found by
    the host (`changes`), or by an engine that compares on the device. Other engines on a GPU under
    Paddle have neither. There the announcements decide alone in training, and without gradients,
    where nobody calls `step()`, nothing is reused.
    """

    def __init__(self, parameters: ExpertParameters) -> None:
        """Reads nothing."""
        self._parameters = parameters
        self._cache = WeightCache()
        self._stale = True
        self._traceless = False

    def __reduce__(self) -> tuple[type[LayerWeights], tuple[ExpertParameters]]:
        """A copy prepares its own weights: FP8 codes cannot be pickled, and need not be."""
        return LayerWeights, (self._parameters,)

    @property
    def sees_writes(self) -> bool:
        """Whether the last `read` would have noticed a write that nobody announced."""
        return not self._traceless

    @property
    def marks(self) -> tuple[int | None, ...]:
        """The traces of writes that the last `read` saw (`changes.Seen`); empty where it read copies
        or saw none.
        """
        return self._cache.marks

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
        if copies is not None and settings.recipe is not None:
            # Weights that this layer has prepared before would lie beside the copies.
            self._cache, self._stale, self._traceless = WeightCache(), True, False
            parameters = parameters or self._parameters.parameters()
            return copies.read(engine, settings, self._parameters, parameters)
        training = grad_enabled()
        parameters = parameters or self._parameters.parameters()
        if IS_PADDLE:
            check_memory(parameters)
        # A parameter that changes its layout in place keeps its addresses.
        place = self._parameters.layout, *map(data_ptr, parameters), parameters[0].dtype
        # PyTorch gives a weight without memory the address 0. The cache needs the addresses
        # anyway, and asking every weight for its memory would take longer than a launch.
        if 0 in place:
            check_memory(parameters)
        seen = look(parameters)
        # In training `step()` must announce every write, so silence counts as no write. Nobody
        # calls `step()` in evaluation. Where the host sees no writes either (no marks: Paddle
        # on a GPU), silence proves nothing.
        told = Change.YES if self._stale else Change.NO
        if told is Change.NO and not seen.marks and not training:
            told = Change.MAYBE
        source = partial(self._parameters.source, parameters)
        reading = self._cache.read(engine, settings, source, parameters[0], place, seen, told)
        lent = _lent(reading.weights, parameters)
        if lent and training:
            reading.lent = lent, look(lent).marks
        # Last, because a read that raised has not used up the announcement.
        self._stale = False
        # Two things notice a write without an announcement: marks on the host, or an engine that
        # compares on the device. Weights that are the user's own memory need nobody to notice.
        noticed = seen.marks or reading.weights.updated_in_place
        self._traceless = not (noticed or len(lent) == _NUM_PROJECTIONS)
        return reading

    def invalidate(self, event: str = "invalidate_caches() announced a write") -> None:
        """Have the next forward make the engine weights again, and no forward read copies that were
        made before. `event`: the announcement, in words for a message.
        """
        self._stale = True
        # Usually nobody holds copies, and listing the parameters of many experts takes a while.
        if change_watchers:
            announce_change(self._parameters.parameters(), event)

    def drop(self) -> None:
        """Free the engine weights; the next forward makes them again."""
        self._cache, self._stale = WeightCache(), True


_NUM_PROJECTIONS = 2


def _lent(weights: EngineWeights, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those of the engine's weights that begin where the first up- or down-projection lies."""
    plain = [w for w in (weights.w1, weights.w2) if isinstance(w, torch.Tensor)]
    if not plain:  # block-scaled ones are memory of the engine's own
        return []
    first = {data_ptr(parameters[0]), data_ptr(parameters[len(parameters) // 2])}
    return [w for w in plain if data_ptr(w) in first]
