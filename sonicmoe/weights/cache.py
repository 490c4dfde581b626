"""Engine weights, kept from one forward to the next until the user's weights change.

    source, traces ──► PreparedWeights.read ──► Reading ──► forward ──► backward: check_current()

The node and the functional API are told of writes by different events, and their weights live for
different times. `layer/bound.py` serves the node: it lives as long as its layer, and `step()` tells
it of optimizer steps. `stacked_cache` serves the functional API: it finds what was prepared of a
parameter by weak references. `copies.WeightCopies` serves trainers that free their weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from ..engine.expert_matrices import ExpertMatrices, tensors_of
from ..engine.interface import Engine, EngineWeight, EngineWeights
from ..engine.settings import EngineSettings
from ..interop import (
    IS_PADDLE,
    data_ptr,
    holds_memory,
    in_backward,
    is_capturing,
    is_cuda,
    plain_ops,
)
from ..layouts import GateUp
from ..quant.format import BlockScaledTensor
from ..quant.reference import dequantize
from ..stream_order import StreamOrder
from ..weight_source import WeightSource
from .changes import Traces, versions_of

Tensor = torch.Tensor


class LookedAtAgain(Protocol):
    """Weights that a backward asks for anew: memory of the user's, or codes that are gathered again."""

    def check(self, weights: EngineWeights) -> EngineWeights:
        """What the backward reads in the place of what its forward read, or raise."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Reading:
    """Engine weights as one forward read them; its backward asks `check_current` before it reads
    them again.

    prepared: keeps the weights for later forwards; None where they are this call's own.
    writes: how many writes to the user's weights `prepared` had seen then.
    lent: of weights that are not the engine's own memory.
    on_backward: called by each backward that may read the weights.
    """

    weights: EngineWeights
    prepared: PreparedWeights | None = None
    writes: int = 0
    lent: LookedAtAgain | None = None
    on_backward: Callable[[], None] | None = None

    def check_current(self) -> None:
        """Raise if a later forward has written changed weights into these buffers, or if the user's own
        memory, where the engine reads that, was written or freed.
        """
        if self.lent is not None:
            self.weights = self.lent.check(self.weights)
        # An engine that made new weights has left these alone. An engine that updates in place
        # returned the same object again, and then only the number of writes tells whether it
        # overwrote them.
        prepared = self.prepared
        is_held = prepared is not None and prepared.weights is self.weights
        if prepared is not None and is_held and prepared.writes != self.writes:
            raise RuntimeError(
                "the expert weights were modified by an inplace operation, and read by another "
                "forward, between this forward and its backward; its gradients would mix old "
                "activations with new weights. Finish every backward before the weights change"
            )
        if self.on_backward is not None:
            self.on_backward()

    def values(self) -> tuple[Tensor, Tensor]:
        """Native weights, `w1 [E, N1, H]` and `w2 [E, H, I]`, as the engine's codes stand for them,
        in fp32; for those who inspect a call whose parameters hold no memory.
        """
        # Backward's pair is there to the end, and its shapes are those of the native matrices.
        held = self.weights.w1_dgrad, self.weights.w2_dgrad
        with plain_ops():
            w1, w2 = map(_values, held)
            # Block-scaled weights are native.
            layout = self.weights.layout
            return layout.native_w1(w1), layout.native_w2(w2)


def _values(weight: EngineWeight) -> Tensor:
    if isinstance(weight, BlockScaledTensor):
        return dequantize(weight)
    if isinstance(weight, GateUp):
        return torch.stack(weight).to(torch.float32)
    plain = weight.stacked() if isinstance(weight, ExpertMatrices) else weight
    return plain.to(torch.float32)


class Binding(NamedTuple):
    """What one call found of a layer, for the calls after it. One tuple, because threads may run calls
    of one layer.

    guard: everything that the rest depends on (docs/design.md, "Stale weights").
    plan: of the call, by which its engine was chosen.
    prepared, weights, lent: as of the call's `Reading`.
    """

    guard: tuple[Any, ...]
    plan: Any
    prepared: PreparedWeights
    weights: EngineWeights
    lent: LookedAtAgain | None = None

    @classmethod
    def of(cls, guard: tuple[Any, ...], plan: Any, reading: Reading) -> Binding | None:
        """None where the next call may need more than `again`."""
        prepared = reading.prepared
        if prepared is None or not prepared.is_settled:
            return None
        return cls(guard, plan, prepared, reading.weights, reading.lent)

    def again(self, anchor: Tensor) -> Reading | None:
        """The weights for a forward under the same guard, for which the engine looks for writes that
        the host does not see; None where the layer must be bound anew. anchor: as of
        `PreparedWeights.read`.
        """
        prepared = self.prepared
        held, streams = prepared.weights, prepared.streams
        streams.enter(anchor)
        try:
            if held is None or not self.plan.chosen.keep(held):
                return None
        finally:
            streams.leave()
        return Reading(self.weights, prepared, prepared.writes, self.lent)


class PreparedWeights:
    """The engine weights of one set of parameters.

    weights: what a later `read` may bring up to date; None before the first, and where nothing is
        kept.
    writes: how many of the writes to the parameters showed on the host.
    captures: whether the last read was recorded by a CUDA graph, which holds addresses only.
    streams: the order of all that reads or makes the weights.
    is_settled: whether a forward after an equal one needs `Binding.again` alone: the weights are kept, and in
        every order that a forward or its backward may want.
    """

    def __init__(self) -> None:
        self.weights: EngineWeights | None = None
        self.writes = 0
        self.captures = self.is_settled = False
        self._of_graphs: list[EngineWeights] = []
        self._key: tuple[Any, ...] | None = None
        self._traces = Traces()
        self._backwards = 0  # beside which a forward read the weights, since they changed
        self.streams = StreamOrder()

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
        alone: bool = False,
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
            alone: no backward of this forward is to come but one beside a forward that runs again.
                What backward alone reads is not made for it, and is left where it is. Inside a
                backward this holds for the first one of unchanged weights: what serves a second one
                is made, and kept.
        """
        key = (engine.name, settings.of_weights, place)
        held = self.weights if key == self._key else None
        if held is not None and not keeps and held.store is None:
            held = None
        written = held is not None and traces.versions != self._traces.versions
        changed = held is None or stale or traces != self._traces
        one_order = engine.in_one_order(settings)
        has_choice = one_order is not settings
        self._backwards = 0 if changed else self._backwards
        if alone and has_choice and held is not None and in_backward():
            # Weights of several micro-batches, or frozen ones: to make the other order in every
            # backward would cost more than to keep it.
            self._backwards += 1
            alone = self._backwards == 1
        if alone:
            settings = one_order
        grows = settings is not one_order and held is not None and held.w1_dgrad is held.w1
        self.captures = is_capturing(anchor)
        if grows and self.captures:
            # Its backward makes the other order in every replay.
            settings, grows = one_order, False
        elif grows and self._of_graphs:
            # A replay brings the codes of the graph up to date, in one order, and would hide what was
            # written from those who read both. So these get codes of their own.
            held, grows = None, False
        # A forward on another stream must wait for the launches that made what it reads.
        self.streams.enter(anchor)
        try:
            if held is None or grows or not engine.keep(held, changed):
                # Views of the parameters are no part of the caller's graph.
                with plain_ops():
                    held = engine.refresh(source(), settings, held, changed)
        finally:
            # Recorded after `refresh`, so that a later forward on another stream waits for these
            # launches, also where one of them failed.
            self.streams.leave()
        # `traces` are from before `refresh` read the weights. A write in between is therefore found
        # by the next forward, and never lost.
        self._key, self._traces = key, traces
        self.weights = held if keeps or held.store is not None else None
        if self.captures and held.store is not None and held not in self._of_graphs:
            self._of_graphs.append(held)
        # Steps of optimizers are not counted: the step of another model must not make an
        # outstanding backward fail.
        self.writes += written
        is_whole = not has_choice or held.two_orders
        self.is_settled = self.weights is not None and is_whole and not self.captures
        return Reading(held, self, self.writes)

    def lend(self) -> None:
        """A forward that starts now reads the weights as they are, without their source."""
        assert self.weights is not None
        self.streams.enter(tensors_of(self.weights.w2_dgrad)[0])
        self.streams.leave()


# ---- plain weights that an engine reads in the user's own memory ----


class LentWeights:
    """The tensors, and their versions when a forward read them."""

    def __init__(self, tensors: Sequence[Tensor], versions: tuple[int, ...]) -> None:
        self._tensors, self._versions = tensors, versions

    def check(self, weights: EngineWeights) -> EngineWeights:
        """Raise if a backward that reads them would read other values than its forward did. Else
        `weights`, of which these are, as `found_again` has them.
        """
        # Under Paddle a tensor without memory must not be asked where it lies.
        apart = isinstance(weights.w1, ExpertMatrices) and not IS_PADDLE
        found = found_again(weights) if apart else weights
        # A matrix that lies where it lay has its memory.
        freed = not (apart and found is weights) and not all(map(holds_memory, self._tensors))
        if freed or versions_of(self._tensors) != self._versions:
            happened = "freed" if freed else "modified by an inplace operation"
            raise RuntimeError(
                f"the expert weights were {happened} between this forward and its backward, which "
                "reads them where they lie; its gradients would be wrong. Finish every backward "
                "before the weights change"
            )
        return found_again(weights) if IS_PADDLE else found


def found_again(weights: EngineWeights) -> EngineWeights:
    """The weights as a backward finds them. FSDP frees those of separate experts after the forward, and may
    gather them at other addresses.
    """
    w1, w2 = map(_where_it_lies, (weights.w1, weights.w2))
    if w1 is weights.w1 and w2 is weights.w2:
        return weights
    return replace(weights, w1=w1, w2=w2, w1_dgrad=w1, w2_dgrad=w2)


def _where_it_lies(weight: EngineWeight) -> EngineWeight:
    if not isinstance(weight, ExpertMatrices):
        return weight
    now = ExpertMatrices(weight.tensors)
    # The object of the forward stays as it is, because later forwards may find it in the cache.
    return weight if now.addresses == weight.addresses else now


def lent_by(
    parameters: Sequence[Tensor], weights: EngineWeights, versions: tuple[int, ...] = ()
) -> tuple[LentWeights | None, EngineWeights]:
    """What a training forward reads of the parameters' own memory, and all that it reads. versions:
    those of all parameters, where somebody asked before.
    """
    # Block-scaled weights are memory of the engine's own.
    if isinstance(weights.w1, BlockScaledTensor) or isinstance(weights.w2, BlockScaledTensor):
        return None, weights
    plain = tensors_of(weights.w1), tensors_of(weights.w2)
    # An address is enough: the first of a projection lies where all of it begins, and of separate
    # matrices all are the user's, or none.
    firsts = data_ptr(parameters[0]), data_ptr(parameters[len(parameters) // 2])
    lent = tuple(itertools.chain(*[each for each in plain if data_ptr(each[0]) in firsts]))
    if not lent:
        return None, weights
    if is_cuda(lent[0]):
        # In the order of the parameters, which count their writes.
        counted = versions if len(versions) == len(lent) else versions_of(lent)
        return LentWeights(lent, counted), weights
    # Nothing on a host shows a write between a forward and its backward, so these read a copy.
    with plain_ops():
        w1, w2 = map(_copied, (weights.w1, weights.w2))
    return None, EngineWeights(w1, w2, w1, w2, layout=weights.layout)


def _copied(weight: EngineWeight) -> Tensor | ExpertMatrices:
    # A node takes no pair of tensors, and block-scaled weights did not come here.
    assert not isinstance(weight, (GateUp, BlockScaledTensor))
    if isinstance(weight, ExpertMatrices):
        return ExpertMatrices([tensor.clone() for tensor in weight.tensors])
    return weight.clone()
