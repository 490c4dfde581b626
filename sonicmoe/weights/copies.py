"""Quantised copies of a layer's weights, made at an event and used until the next one.

    event ──► WeightCopies(engine, settings, layer) ──► read ──► forward ──► backward
                 │ the trainer may free the parameters' memory here
                 └── release_forward: backward's order only

Where the parameters hold memory, a forward brings the copies up to date as it does a node's own
weights: an engine that looks for writes does so in the same buffers. Where it was freed there is
nothing to look at, and the events decide: a write that somebody announces, or that PyTorch shows,
makes copies stale, and a forward on them raises `StaleWeightsError` (docs/weights.md).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence, Set
from functools import partial

import torch

from ..engine.interface import Engine, EngineWeights
from ..engine.settings import EngineSettings
from ..enums import is_glu
from ..errors import ConfigError, LayoutError, StaleWeightsError, expect
from ..interop import IS_PADDLE, grad_enabled, holds_memory, is_cuda, plain_ops
from ..quant.format import BlockScaledTensor
from ..quant.reference import transpose_storage
from ..weight_source import same_objects
from .cache import PreparedWeights, Reading
from .changes import change_watchers, traces_of
from .parameters import ExpertParameters, check_memory

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")


class WeightCopies:
    """Engine weights under an FP8 recipe, as one event made them.

    The caller holds them, and hands them to the forwards that are to read them: a node keeps none.
    They keep no parameter alive.

    weights: the buffers.
    backwards: how many backwards have read them since the event.
    """

    def __init__(self, engine: Engine, settings: EngineSettings, layer: ExpertParameters) -> None:
        """Quantise the weights of `layer` now; they must hold memory, and the settings a recipe."""
        if settings.recipe is None:
            raise ConfigError(
                f"copies of the weights are quantised, and the {engine.name} engine computes without FP8 recipe here; needed: "
                "fp8_mode='perf' or 'mem', and sizes that an FP8 engine takes"
            )
        with plain_ops():
            parameters = layer.parameters()
            check_memory(parameters)
            self._settings, self._fit = settings.of_weights, fit(engine, settings)
            # Weakly: a model that drops a parameter gets its memory back, whoever holds the copies.
            self._made_of = [weakref.ref(parameter) for parameter in parameters]
            # Announcements name parameters by id, which is quicker to compare than references.
            self._ids = set(map(id, parameters))
            self._prepared = PreparedWeights()
            made = self._refresh(engine, layer, parameters, stale=True).weights
            # From here on this object decides what is kept, and in which buffers.
            self.weights = self._prepared.weights = in_orders(made, settings.iso_weight)
        self._place = _place(layer, parameters)
        self._recomputing: weakref.WeakSet[Reading] = weakref.WeakSet()
        self._stale = ""
        self._renew(parameters)
        change_watchers.add(self)

    def __reduce__(self) -> str | tuple[object, ...]:
        """Buffers of an engine are nobody's to save."""
        raise TypeError(
            "FP8 copies of weights belong to this process; needed: weight.fp8 = None and weight.transposed_fp8 = None before the "
            "weights are saved or copied with their attributes"
        )

    @property
    def iso_weight(self) -> bool:
        """Whether forward and backward read one buffer."""
        return not self.weights.two_orders

    @property
    def is_released(self) -> bool:
        """Whether only backward's order is left."""
        return self.weights.w1 is None

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        layer: ExpertParameters,
        parameters: Sequence[Tensor],
    ) -> Reading:
        """The copies for a forward that starts now."""
        self._check_fit(engine, settings, parameters)
        # Where any of them was freed nothing can be made again, because an engine quantises all
        # experts at once.
        if all(map(holds_memory, parameters)):
            with plain_ops():
                self._bring_up_to_date(engine, layer, parameters)
        else:
            self._check_current(parameters)
        prepared = self._prepared
        prepared.lend()
        reading = Reading(self.weights, prepared, prepared.writes, on_backward=self._count_backward)
        if settings.recompute_z:
            # Its backward repeats the up-projection, so it needs forward's order too.
            self._recomputing.add(reading)
        return reading

    def _count_backward(self) -> None:
        self.backwards += 1

    def release_forward(self) -> str:
        """Free forward's order, of which no forward is to come before the next event; backwards of
        the forwards that are outstanding read the other one.

        Returns:
            Why it was kept, in words for a log line, or "" where it was freed.
        """
        weights = self.weights
        if self.is_released:
            return ""
        if not weights.two_orders:
            return "forward and backward read the same buffers (iso_weight, Fleet's format 32x32)"
        if len(self._recomputing):
            return f"{len(self._recomputing)} outstanding backward(s) recompute z from it"
        forward = [q for q in (weights.w1, weights.w2) if isinstance(q, BlockScaledTensor)]
        # Launches of earlier forwards may still read it. A graph reads it at every replay.
        if not IS_PADDLE and is_cuda(forward[0].bytes):
            if torch.cuda.is_current_stream_capturing():
                return "a CUDA graph that is being captured reads it"
            _outlive_current_stream(forward)
        weights.release_forward()
        return ""

    def note_change(self, written: Set[int], event: str) -> None:
        """Somebody has announced writes to parameters with these ids."""
        if not self._ids.isdisjoint(written):
            self.expire(event)

    def expire(self, event: str) -> None:
        """Make them stale. `event`: what happened to the weights, in words for a message."""
        # The first event is the reason; later ones change nothing.
        self._stale = self._stale or event

    def _renew(self, parameters: Sequence[Tensor]) -> None:
        """The copies are those of the weights as they are now."""
        self.backwards, self._stale = 0, ""
        self._versions = traces_of(parameters).versions

    def _check_fit(
        self, engine: Engine, settings: EngineSettings, parameters: Sequence[Tensor]
    ) -> None:
        asked = fit(engine, settings)
        if asked != self._fit:
            raise ConfigError(
                f"the copies of the weights were made for {named(*self._fit)}, and this call computes with {named(*asked)}; "
                "needed: copies that were made with the configuration of the call"
            )
        made_of = [reference() for reference in self._made_of]
        expect(
            same_objects(made_of, parameters),
            LayoutError,
            "the copies were made of other parameters than this layer has; needed: copies of these",
        )

    def _check_current(self, parameters: Sequence[Tensor]) -> None:
        """Raise StaleWeightsError if these copies are older than the last known write. The parameters
        hold no memory, so nothing can be compared or made again.
        """
        # They are inputs of the PyLayer where gradients are on.
        if IS_PADDLE and grad_enabled():
            _check_places(parameters)
        reason = self._stale
        if not reason and traces_of(parameters).versions != self._versions:
            reason = "the weights were modified by an inplace operation"
        if self.is_released:
            reason = "forward's order was released after the last forward that was announced"
        if reason:
            raise StaleWeightsError(
                f"the FP8 copies of the expert weights are stale: {reason}; and the parameters hold no "
                "memory to make them again from. Needed: new copies, made after the weights change and before their memory is "
                "freed"
            )

    def _refresh(
        self, engine: Engine, layer: ExpertParameters, parameters: Sequence[Tensor], *, stale: bool
    ) -> Reading:
        return self._prepared.read(
            engine,
            self._settings,
            partial(layer.source, parameters),
            parameters[0],
            (),  # one place for all: they are made again into the same buffers wherever they lie
            traces_of(parameters),
            stale=stale,
            # A host looks at the weights anyway, and Paddle's optimizers leave no trace.
            keeps=is_cuda(parameters[0]) and not IS_PADDLE,
        )

    def _bring_up_to_date(
        self, engine: Engine, layer: ExpertParameters, parameters: Sequence[Tensor]
    ) -> None:
        """For parameters that hold memory."""
        if self.is_released:
            raise StaleWeightsError(
                "forward's order of the FP8 copies was released; needed: new copies for another forward"
            )
        prepared, place = self._prepared, _place(layer, parameters)
        writes, moved = prepared.writes, place != self._place
        made = self._refresh(engine, layer, parameters, stale=bool(self._stale) or moved).weights
        if made is not self.weights:
            # An engine that does not look has made others, and outstanding backwards keep theirs.
            self.weights = prepared.weights = in_orders(made, self._settings.iso_weight)
        elif moved:
            # The engine has overwritten its codes, and no version counter says so.
            prepared.writes += 1
        self._place = place
        self._versions = traces_of(parameters).versions
        if self._stale or prepared.writes != writes:
            event = self._stale or "expert weights changed without an announcement"
            logger.info("FP8 copies of expert weights were made again: %s", event)
            self._renew(parameters)


def used_copies() -> list[WeightCopies]:
    """All copies that a backward has read since their event."""
    watching = list(change_watchers)
    return [each for each in watching if isinstance(each, WeightCopies) and each.backwards]


def _check_places(parameters: Sequence[Tensor]) -> None:
    """Refuse, by name, what Paddle's PyLayer would refuse as one of its inputs."""
    for index, parameter in enumerate(parameters):
        try:
            parameter.place  # type: ignore[attr-defined]  # noqa: B018
        except RuntimeError as error:
            raise LayoutError(
                f"the memory of weight {index} of the experts was freed in a way that leaves no device, and Paddle takes no such tensor "
                "into a graph; needed: _clear_to_zero_allocation(), as the sharding optimizers free it"
            ) from error


def fit(engine: Engine, settings: EngineSettings) -> tuple[str, str | None, bool]:
    """What copies depend on, apart from the number of buffers."""
    recipe = settings.recipe
    return engine.name, None if recipe is None else recipe.name, is_glu(settings.activation)


def named(engine: str, recipe: str | None, gated: bool) -> str:
    """What `fit` returned, in words."""
    kind = "a gated" if gated else "an ungated"
    return f"engine {engine!r}, recipe {recipe!r} and {kind} activation"


def _place(layer: ExpertParameters, parameters: Sequence[Tensor]) -> tuple[object, ...]:
    # A version counter says nothing of values that came with other memory. On a host every forward
    # makes them again.
    return layer.place(parameters) if is_cuda(parameters[0]) else ()


def in_orders(made: EngineWeights, iso_weight: bool) -> EngineWeights:
    """`made`, with a buffer for each direction, unless `iso_weight`."""
    w1, w2 = made.w1, made.w2
    assert isinstance(w1, BlockScaledTensor) and isinstance(w2, BlockScaledTensor)
    # The reference engine reads one in both where the recipe allows that. Fleet's format has two.
    if iso_weight or made.two_orders or w1.serves_both:
        return made
    return EngineWeights(w1, w2, transpose_storage(w1), transpose_storage(w2))


def _outlive_current_stream(buffers: Sequence[BlockScaledTensor]) -> None:
    """Have PyTorch give this memory to nobody before the current stream has read it."""
    # The buffers may belong to another stream, whose next allocation would not wait.
    stream = torch.cuda.current_stream(buffers[0].bytes.device)
    for q in buffers:
        for part in q.parts:
            part.record_stream(stream)
