"""The user's stacked expert weights: how they lie, and what engines made of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import layouts
from ..engine.interface import Engine, EngineSettings, EngineWeights, GradAccumulators
from ..errors import ConfigError, FrameworkError, expect
from ..interop import IS_PADDLE, is_cuda, plain_ops
from ..layouts import StackedMatrices, WeightSource
from ..weight_changes import optimizer_steps

if IS_PADDLE:
    raise FrameworkError(
        "sonicmoe.functional and sonicmoe.MoE are the PyTorch face; under Paddle use sonicmoe.ernie_compat.SonicMoEMlpNode"
    )

from torch.multiprocessing.reductions import StorageWeakRef  # Paddle's proxy has neither
from torch.utils.weak import WeakTensorKeyDictionary

Tensor = torch.Tensor
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class WeightLayout:
    """Axes and row order of stacked weights `(w1, w2, b1, b2)`; the default is native: w1 `[E, N1,
    H]` interleaved, w2 `[E, H, I]`.

    Attributes:
        transposed: w1 is `[E, H, N1]` and w2 `[E, I, H]`.
        split_half: the N1 = 2I entries of w1 and b1 are [gate; up] halves instead of (gate, up)
            pairs.
    """

    transposed: bool = False
    split_half: bool = False

    def intermediate_size(self, weights: Weights) -> int:
        return int(weights[1].shape[1 if self.transposed else 2])

    def source(self, weights: Weights) -> WeightSource:
        """Each expert's matrices where they lie; copies only of what is not contiguous."""
        up, down = (StackedMatrices(weight.detach().contiguous()) for weight in weights[:2])
        return WeightSource(up, down, self.transposed, self.split_half)

    def native(self, weights: Weights) -> Weights:
        """Native, contiguous weights: the user's own memory where it is already so."""
        w1, w2, b1, b2 = (None if weight is None else weight.detach() for weight in weights)
        assert w1 is not None and w2 is not None
        if self.transposed:
            w1, w2 = w1.transpose(-2, -1), w2.transpose(-2, -1)
        if self.split_half:
            w1 = layouts.interleave_gate_up(w1)
            b1 = None if b1 is None else layouts.interleave_bias(b1)
        return w1.contiguous(), w2.contiguous(), b1, b2

    def gradients(
        self, accumulators: GradAccumulators, dtypes: tuple[torch.dtype | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """`(dw1, dw2, db1, db2)` rounded once to `dtypes`, in the order and shape of the user's
        weights; None where there is none.
        """
        summed = (accumulators.dw1, accumulators.dw2, accumulators.db1, accumulators.db2)
        # Rounded before they are rearranged: half the bytes to move.
        dw1, dw2, db1, db2 = (
            None if gradient is None or dtype is None else gradient.to(dtype)
            for gradient, dtype in zip(summed, dtypes, strict=True)
        )
        if self.split_half:
            dw1 = None if dw1 is None else layouts.deinterleave_gate_up(dw1)
            db1 = None if db1 is None else layouts.deinterleave_bias(db1)
        if self.transposed:
            dw1, dw2 = (
                None if dw is None else dw.transpose(-2, -1).contiguous() for dw in (dw1, dw2)
            )
        return dw1, dw2, db1, db2


@dataclass(frozen=True, eq=False)
class _Kept:
    """Quantised weights, what they were made of, and the memory they were made from: freed, it may
    return under the same address.

    They hold none of it: weights that a model moved or let go are freed at once, and their copies
    with the parameter.
    """

    key: tuple[Any, ...]
    prepared: EngineWeights
    memory: tuple[StorageWeakRef, ...]

    def is_dead(self) -> bool:
        """Whether memory they were made from was freed."""
        return any(storage.expired() for storage in self.memory)


# w1, or the parameter that it is a view of (a view is a new object at every call), to what is kept
# of it by place in memory: a parameter takes its entries along when it dies, and no entry holds the
# parameter.
_kept = WeakTensorKeyDictionary()
# Entries that a CUDA graph reads, which holds no reference of its own: they stay as long as the
# parameter, whatever replaces them.
_captured = WeakTensorKeyDictionary()
# Prepared weights that an engine brings up to date in place, to the version counters they were made
# of.
_versions: WeakKeyDictionary[EngineWeights, tuple[int | None, ...]] = WeakKeyDictionary()


def prepared_weights(
    engine: Engine,
    weights: Weights,
    settings: EngineSettings,
    layout: WeightLayout,
    dtype: torch.dtype,
) -> EngineWeights:
    """Prepare `(w1, w2, b1, b2)` for `engine`, or return what was prepared from the same bytes.

    Without a recipe both operands of a product are in `dtype`, that of the tokens: autocast leaves
    parameters in fp32.

    Reused while w1, or the parameter that it is a view of, lives, storage and version counters
    stand still and no `torch.optim.Optimizer` steps. PyTorch's in-place operations move the version
    counter, a view's and its parameter's alike; a write through `.data` moves
    nothing: call `forget`.
    Nothing is kept of inference tensors, which have no version counter; of unquantised weights,
    which are the user's own memory, or a second copy of the model where they had to be rearranged
    or cast; in a process that uses `fully_shard`, which refills the memory of gathered weights and
    sets the version counter back; and while a CUDA graph is captured, whose replays must quantise
    the weights of their time.
    """
    if engine.follows_weights:
        return _followed(engine, weights, settings, layout)
    if settings.recipe is None or not _may_keep(weights):
        _drop(weights[0])
        return _prepare(engine, weights, settings, layout, dtype)
    key = (
        engine.name,
        settings,
        layout,
        _places(weights),
        _version_counters(weights),
        optimizer_steps(),
    )
    kept = _find(weights[0])
    if kept is None or kept.key != key:
        kept = _Kept(key, _prepare(engine, weights, settings, layout, dtype), _memory(weights))
        _keep(weights[0], kept)
    return kept.prepared


def _followed(
    engine: Engine, weights: Weights, settings: EngineSettings, layout: WeightLayout
) -> EngineWeights:
    """Kept as long as w1 lives, and brought up to date on the device at every call, in a CUDA graph
    at every replay.
    """
    expect(
        weights[2] is None,
        ConfigError,
        f"the {engine.name} engine has no biases; needed: b1 and b2 None",
    )
    if _any_module_is_sharded() or any(
        weight is not None and weight.is_inference() for weight in weights
    ):
        _drop(weights[0])
        return engine.prepare_source(layout.source(weights), settings, None, True)
    # Other weights get buffers of their own: those of an outstanding forward are still to be read
    # by its backward.
    place = (engine.name, settings, layout, _places(weights))
    versions = _version_counters(weights)
    key = (place, (versions, optimizer_steps()))
    kept = _find(weights[0])
    if kept is not None and kept.key[0] != place:
        kept = None
    previous = None if kept is None else kept.prepared
    prepared = engine.prepare_source(
        layout.source(weights), settings, previous, kept is None or kept.key != key
    )
    if kept is None or kept.key != key or kept.prepared is not prepared:
        _versions[prepared] = versions
        _keep(weights[0], _Kept(key, prepared, _memory(weights)))
    if is_cuda(weights[0]) and torch.cuda.is_current_stream_capturing():
        _captured.setdefault(_owner(weights[0]), set()).add(prepared)
    return prepared


def forget(w1: Tensor) -> None:
    """Drop what was prepared from these weights, and from every other view of the same tensor."""
    _kept.pop(_owner(w1), None)


def versions_of(prepared: EngineWeights) -> tuple[int | None, ...] | None:
    """Version counters of the weights that an engine which follows weights last read; None for
    copies that never change.
    """
    return _versions.get(prepared)


def _owner(w1: Tensor) -> Tensor:
    """Of views, only a plain parameter's: flattened and distributed ones are refilled behind their
    version counter.
    """
    return w1._base if type(w1._base) is torch.nn.Parameter else w1


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _find(w1: Tensor) -> _Kept | None:
    entries: dict[tuple[Any, ...], _Kept] = _kept.get(_owner(w1), {})
    kept = entries.get(_geometry(w1))
    return None if kept is None or kept.is_dead() else kept


def _keep(w1: Tensor, kept: _Kept) -> None:
    owner = _owner(w1)
    entries: dict[tuple[Any, ...], _Kept] = _kept.setdefault(owner, {})
    entries.pop(_geometry(w1), None)
    entries[_geometry(w1)] = kept
    # More than fit side by side into one tensor overlap: the oldest goes, so that entries cannot
    # grow without end.
    if len(entries) > max(1, owner.numel() // max(1, w1.numel())):
        del entries[next(iter(entries))]


def _drop(w1: Tensor) -> None:
    entries = _kept.get(_owner(w1))
    if entries is not None:
        entries.pop(_geometry(w1), None)


def _places(weights: Weights) -> tuple[Any, ...]:
    return tuple(None if t is None else (t.data_ptr(), *_geometry(t)) for t in weights)


def _version_counters(weights: Weights) -> tuple[int | None, ...]:
    return tuple(None if t is None else t._version for t in weights)


def _memory(weights: Weights) -> tuple[StorageWeakRef, ...]:
    return tuple(StorageWeakRef(t.untyped_storage()) for t in weights if t is not None)


def _prepare(
    engine: Engine,
    weights: Weights,
    settings: EngineSettings,
    layout: WeightLayout,
    dtype: torch.dtype,
) -> EngineWeights:
    with plain_ops():
        w1, w2, b1, b2 = layout.native(weights)
        if settings.recipe is None:
            w1, w2 = w1.to(dtype), w2.to(dtype)
        else:  # what is kept must not hold the user's biases
            b1, b2 = (
                None if bias is None else bias.to(torch.float32, copy=True) for bias in (b1, b2)
            )
        return engine.prepare_weights(w1, w2, b1, b2, settings)


def _may_keep(weights: Weights) -> bool:
    if _any_module_is_sharded():
        return False
    if is_cuda(weights[0]) and torch.cuda.is_current_stream_capturing():
        return False
    return not any(weight is not None and weight.is_inference() for weight in weights)


def _any_module_is_sharded() -> bool:
    """Whether `fully_shard` was applied in this process: it makes a class of its own for every
    class of modules it manages.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    base = getattr(fsdp, "FSDPModule", None)
    if base is None:
        return False
    kinds = base.__subclasses__()  # and theirs: `replicate` derives from it
    return any(
        issubclass(k, torch.nn.Module) for kind in kinds for k in (kind, *kind.__subclasses__())
    )
