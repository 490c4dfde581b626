"""What an engine made of one set of weights, kept until the weights change.

    source, seen ──► WeightCache.read ──► Reading ──► forward ──► backward: check_current()

The faces differ in what they can see of a write and in how long a cache lives. `LayerWeights`, for
the node, lives as long as its layer and is told of every optimizer step. `stacked_cache`, for the
functional API, finds the cache of a parameter by weak references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..engine.interface import Change, Engine, EngineSettings, EngineWeights
from ..interop import grad_enabled, plain_ops
from ..layouts import WeightSource
from ..stream_order import StreamOrder
from .changes import Seen, look
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
    """

    weights: EngineWeights
    cache: WeightCache | None = None
    writes: int = 0
    unannounced: Unannounced | None = None

    def check_current(self) -> None:
        """Does nothing where the weights are still those that the forward read. An engine that made
        new ones since left these as they were; one that updates in place has overwritten them.

        Raises:
            RuntimeError: a later forward has written changed weights into these buffers.
        """
        cache = self.cache
        if cache is None or cache.weights is not self.weights or cache.writes == self.writes:
            return
        raise RuntimeError(
            "the expert weights were modified by an inplace operation, and read by another "
            "forward, between this forward and its backward; its gradients would mix old "
            "activations with new weights. Finish every backward before the weights change"
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
        source: WeightSource,
        place: tuple[Any, ...],
        seen: Seen,
        told: Change = Change.NO,
    ) -> Reading:
        """The weights for a forward that starts now.

        Args:
            engine, settings, source: as in `Engine.refresh`.
            place: where the weights lie. Weights at another place, another engine and other
                settings get engine weights of their own, because an outstanding forward may still
                have to read the old ones in its backward.
            seen: what the host sees of the weights now.
            told: what the caller knows beside that.
        """
        key = (engine.name, settings, place)
        previous = self.weights if key == self._place else None
        written = previous is not None and seen.marks != self._seen.marks
        stepped = previous is not None and seen.optimizer_steps != self._seen.optimizer_steps
        change = Change.YES if previous is None or written or stepped else told
        # A forward on another stream must wait for the launches that made what it reads.
        self._streams.enter(source.anchor)
        self.weights = engine.refresh(source, settings, previous, change)
        self._streams.leave()
        self._place, self._seen = key, seen
        self.writes += written
        unannounced = None
        if told is not Change.YES and (written or stepped):
            unannounced = Unannounced.WRITE if written else Unannounced.OPTIMIZER_STEP
        return Reading(self.weights, self, self.writes, unannounced)


class LayerWeights:
    """The engine weights of one node, made once per optimizer step.

    `step()` and `invalidate_caches()` announce writes. Behind that contract stands what the host
    can see (`changes`), and an engine that looks on the device sees every optimizer step. Where
    neither sees anything, which is Paddle on a GPU with other engines, the contract is all there is
    in training; without gradients, where nobody calls `step()`, nothing is reused.
    """

    def __init__(self, parameters: ExpertParameters) -> None:
        """Reads nothing."""
        self._parameters = parameters
        self._cache = WeightCache()
        self._stale = True
        self._traceless = False

    @property
    def sees_writes(self) -> bool:
        """Whether the last `read` would have noticed a write that nobody announced."""
        return not self._traceless

    def read(
        self, engine: Engine, settings: EngineSettings, parameters: Sequence[Tensor] | None = None
    ) -> Reading:
        """The weights for a forward that starts now. `parameters`: read from the layer a moment
        ago, if they were.

        Raises:
            LayoutError: the framework has freed the memory of a weight.
        """
        training = grad_enabled()
        with plain_ops():
            parameters = parameters or self._parameters.parameters()
            check_memory(parameters)
            source, seen = self._parameters.source(parameters), look(parameters)
            told = Change.YES if self._stale else Change.NO
            if told is Change.NO and not seen.marks and not training:
                told = Change.MAYBE
            reading = self._cache.read(engine, settings, source, source.pointers, seen, told)
        self._stale = False
        self._traceless = not (seen.marks or reading.weights.updated_in_place)
        return reading

    def invalidate(self) -> None:
        """Trust nothing derived from the weights; the next forward makes it anew."""
        self._stale = True
