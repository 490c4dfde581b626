"""Engine weights of the stacked tensors that callers pass to every call. Each is found by the
parameter's memory, and is dropped with it.

A view is a new tensor object at every call. So what is kept belongs to the memory of the parameter
that the view was made of. It is stored under the view's geometry, and remembers in which memory all
of the weights were:

    memory of w1 (weak) ──► _Beside ──► geometry of w1 ──► _Kept(place, memory, PreparedWeights)

Nothing here holds the user's weights. A model that moves or frees them gets its memory back at
once, and the engine weights go with the parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..engine.interface import Engine, EngineWeights
from ..engine.settings import EngineSettings
from ..errors import FrameworkError
from ..interop import IS_PADDLE, is_capturing
from ..layouts import Codes, StackedWeights, WeightLayout, flat_weights
from ..weight_source import WeightSource
from .cache import Binding, PreparedWeights, Reading
from .changes import Traces, traces_of
from .frozen import engine_weights

if IS_PADDLE:
    raise FrameworkError(
        "sonicmoe.functional and sonicmoe.MoE are the PyTorch face; under Paddle use "
        "sonicmoe.ernie_compat.SonicMoEMlpNode"
    )

# `StorageWeakRef` names an allocation without keeping it.
from torch.multiprocessing.reductions import StorageWeakRef  # Paddle's proxy has neither
from torch.utils.weak import WeakIdRef

from .shards import GATHERED, codes_behind, expire_codes  # which imports such too

Tensor = torch.Tensor
Weights = StackedWeights


@dataclass(eq=False)
class _Kept:
    """What was prepared, the place of the weights that it was made of, and weak references to their
    memory. Once freed, that memory may return under the same address with other values.

    binding: of the last call; None where the next one must read the weights.
    """

    place: tuple[Any, ...]
    prepared: PreparedWeights
    memory: tuple[StorageWeakRef, ...]
    binding: Binding | None = None

    def is_dead(self) -> bool:
        """Whether memory of the weights was freed."""
        return any(map(StorageWeakRef.expired, self.memory))


class _Beside:
    """What is kept of all weights in one memory, as long as that lives.

    entries: by the geometry of w1, the youngest last.
    captured: engine weights that a CUDA graph reads, which holds addresses and no reference: they
        stay, whatever replaces them among the entries.
    """

    def __init__(self, owner: Tensor | torch.UntypedStorage) -> None:
        """Forgotten with `owner`, of `_owner`."""
        self.entries: dict[tuple[Any, ...], _Kept] = {}
        self.captured: set[EngineWeights] = set()
        key = id(owner)
        self._owner = WeakIdRef(owner, lambda _: _beside.pop(key, None))

    def keep(self, geometry: tuple[Any, ...], kept: _Kept, room: int) -> None:
        """`room`: how many such views fit side by side into the memory."""
        # Removed first, because a dict keeps the position of a key that it has.
        self.entries.pop(geometry, None)
        self.entries[geometry] = kept
        # More than fit side by side overlap: the oldest goes, so that entries cannot grow without
        # end.
        if len(self.entries) > max(1, room):
            del self.entries[next(iter(self.entries))]


# By the id of the owner, because `==` of tensors is elementwise.
_beside: dict[int, _Beside] = {}


class Looked(NamedTuple):
    """What a call sees of weights of which something is kept.

    guard: all that its plan and its engine weights depend on.
    binding: of the last call on this memory, where that had the same guard.
    plan: of the last call, where that asked the same.
    kept, present, places, traces: of the weights, for `read_weights`.
    """

    guard: tuple[Any, ...]
    binding: Binding | None
    plan: Any
    kept: _Kept
    present: list[Tensor]
    places: list[Any]
    traces: Traces


def look(flat: Sequence[Any], asked: tuple[Any, ...]) -> Looked | None:
    """None where nothing of these weights is kept. flat: see `flat_weights`. asked: what decides the
    plan, beside the weights.
    """
    w1 = flat[0]
    beside = _beside.get(id(_owner(w1))) if _beside else None
    if beside is None or GATHERED or (_FSDP in sys.modules and _any_module_is_sharded()):
        return None
    present, places = _places(flat)
    kept = beside.entries.get(places[0][1:])
    if kept is None:
        return None
    traces, bound = traces_of(present), kept.binding
    guard, plan = (asked, places, traces, is_capturing(w1)), None
    if bound is not None:
        plan = bound.plan if bound.guard[0] == asked else None
        bound = bound if bound.guard == guard and not kept.is_dead() else None
    return Looked(guard, bound, plan, kept, present, places, traces)


def read_weights(
    engine: Engine,
    weights: Weights,
    settings: EngineSettings,
    layout: WeightLayout,
    dtype: torch.dtype,
    alone: bool = False,
    once: bool = False,
    backward: bool = False,
    looked: Looked | None = None,
    plan: object = None,
) -> Reading:
    """Weights `(w1, w2, b1, b2)` as `engine` reads them, for one forward; alone: as of
    `PreparedWeights.read`; once: the backward of this forward reads them anew; backward: this is
    that one. looked: as of `look`, for later calls, which find the plan under its guard. Of weights
    whose codes FSDP2 gathered nothing is made.

    Without a recipe the weights are cast to `dtype`, that of the tokens, because autocast leaves
    parameters in fp32.

    Only codes of an engine that looks for writes on the device are kept, while the memory of w1
    lives and stays the same. docs/design.md, "Stale weights", has
    the events that make such an engine quantise whatever it finds. `forget` announces a write that
    its sample may miss. Nothing is kept of

    * inference tensors, which have no version counter;
    * anything in a process that uses `fully_shard`, which refills the memory of gathered weights
      and sets the version counter back.

    While a CUDA graph is captured nobody knows the weights of its replays. An engine that updates
    its weights in place does so at every replay, and `_captured` keeps its buffers for the graph.
    Any other engine prepares the weights inside the graph, in memory that is the graph's own.
    """
    if type(weights[0]) is Codes:  # nothing is made of these, so nothing can be stale
        return Reading(engine_weights(engine, weights, settings))
    flat = flat_weights(weights)
    w1 = flat[0]  # its gate half where gate and up are two tensors
    codes = codes_behind(w1) if GATHERED else None
    if codes is not None:
        b1, b2 = weights[2:]
        biases = None if b1 is None else layout.native_b1(b1.detach()), b2
        return codes.read(engine, settings, biases, backward)
    if settings.recipe is None:
        return _read_once(engine, weights, layout, dtype, settings, w1)
    present, places = _places(flat) if looked is None else (looked.present, looked.places)
    is_inference = any(map(torch.Tensor.is_inference, present))
    is_sharded = looked is None and _FSDP in sys.modules and _any_module_is_sharded()
    if is_inference or is_sharded:
        settings = engine.in_one_order(settings) if alone or once else settings
        return _read_once(engine, weights, layout, dtype, settings, w1)
    # The place names w1, w2 and both biases. Another w2 or bias beside the same w1 gets buffers of
    # its own, because the backward of an outstanding forward has still to read the old ones.
    place, geometry = (engine.name, settings, layout, places), places[0][1:]
    if looked is None:
        beside = _beside.get(id(_owner(w1)))
        kept = None if beside is None else beside.entries.get(geometry)
    else:
        kept = looked.kept
    # The allocator may hand an address out again, with other values behind it.
    is_ours = kept is not None and kept.place == place and not kept.is_dead()
    prepared = kept.prepared if kept is not None and is_ours else PreparedWeights()
    source = partial(WeightSource.stacked, *weights, layout=layout, compute_dtype=dtype)
    # Memory of another owner may have other traces of writes.
    traces = traces_of(present) if looked is None else looked.traces
    reading = prepared.read(engine, settings, source, w1, place, traces, alone=alone)
    if reading.weights.store is None:
        return reading
    if prepared.captures or kept is None or not is_ours:
        kept = _keep(w1, place, prepared, present)
    if looked is not None:
        kept.binding = Binding.of(looked.guard, plan, reading)
    return reading


def _keep(
    w1: Tensor, place: tuple[Any, ...], prepared: PreparedWeights, present: list[Tensor]
) -> _Kept:
    """Keep what was prepared of weights at this place."""
    owner, geometry = _owner(w1), place[-1][0][1:]
    beside = _beside.get(id(owner)) or _beside.setdefault(id(owner), _Beside(owner))
    if prepared.captures:
        assert prepared.weights is not None
        beside.captured.add(prepared.weights)
    kept = _Kept(place, prepared, _memory(present))
    beside.keep(geometry, kept, w1.untyped_storage().nbytes() // max(1, w1.nbytes))
    return kept


def _read_once(
    engine: Engine,
    weights: Weights,
    layout: WeightLayout,
    dtype: torch.dtype,
    settings: EngineSettings,
    w1: Tensor,
) -> Reading:
    # An earlier call may have kept codes of the same weights, before a switch of the precision or
    # before `fully_shard`. Nobody would find them again, and they are as large as the weights.
    if _beside and (beside := _beside.get(id(_owner(w1)))) is not None:
        _, (place,) = _places([w1])
        beside.entries.pop(place[1:], None)
    return Reading(engine.read_stacked(weights, layout, dtype, settings))


def forget(w1: Tensor) -> None:
    """Drop what was prepared from these weights, and from every other view of their memory."""
    beside = _beside.get(id(_owner(w1)))
    if beside is not None:
        beside.entries.clear()
    expire_codes(w1)


def _owner(w1: Tensor) -> Tensor | torch.UntypedStorage:
    """What entries are stored under: the memory of the parameter that `w1` is, or is a view of, else
    `w1` itself.

    Only a plain `Parameter` counts, because flattened and distributed ones are refilled without
    moving their version counter. Its memory stands for it, because `torch.utils.swap_tensors`
    refuses tensors that somebody refers to weakly.
    """
    # `torch.Tensor._base` is the tensor that a view was made of, None for a tensor of its own.
    parameter = w1 if w1._base is None else w1._base
    return parameter.untyped_storage() if type(parameter) is torch.nn.Parameter else w1


def _places(weights: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Any]]:
    """The tensors that there are; and of each, None where there is none, its address and geometry."""
    present: list[Tensor] = []
    places: list[Any] = []
    for weight in weights:
        if weight is None:
            places.append(None)
            continue
        present.append(weight)
        geometry = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
        places.append((weight.data_ptr(), *geometry))
    return present, places


def _memory(weights: list[Tensor]) -> tuple[StorageWeakRef, ...]:
    return tuple(StorageWeakRef(t.untyped_storage()) for t in weights)


# Looked up and not imported: a process that never loaded the module cannot have used it.
_FSDP = "torch.distributed.fsdp"


def _any_module_is_sharded() -> bool:
    """Whether `fully_shard` was applied in this process: it makes a class of its own for every
    class of modules it manages.
    """
    base = getattr(sys.modules[_FSDP], "FSDPModule", None)
    if base is None:
        return False
    kinds = base.__subclasses__()  # and theirs: `replicate` derives from it
    return bool(kinds) and any(
        issubclass(k, torch.nn.Module) for kind in kinds for k in (kind, *kind.__subclasses__())
    )
