"""The weights of the BF16 engine on Hopper, which reads them where they lie.

What depends on shapes, strides, dtypes and settings is checked once. A later call is recognised by
these, and only its addresses are looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from operator import or_
from typing import Any

import torch

from ..enums import ActivationType
from ..interop import aligned, data_ptr
from ..layouts import GateUp, StackedWeights, WeightLayout, stack
from ..weight_source import StackedMatrices, WeightSource, same_objects
from .border import check_shapes
from .expert_matrices import ExpertMatrices, may_stay_apart, tensors_of
from .interface import EngineWeights
from .settings import EngineSettings

Tensor = torch.Tensor
# Addresses and strides that the copy engine takes are multiples of 16 bytes, or 8 elements.
_BYTES, _ITEMS = 16, 8
_DEPTH = 64  # rows of K that dgrad takes at a time, of one tensor


def weights_in_place(source: WeightSource, activation: ActivationType) -> EngineWeights:
    """The user's weights where they lie. Four kinds are copied: weights of another dtype than the
    computation's, those that the copy engine cannot read, more than `MOST` experts with tensors of
    their own, and gate and up in two tensors that differ in strides or have no multiple of 64 rows.
    ShapeError where sizes do not fit together.
    """
    sides = source.up, source.down
    w1: Any
    w1, w2 = (
        map(ExpertMatrices, sides)
        if _stay_apart(source)
        else (_stacked(side, source.compute_dtype) for side in sides)
    )
    layout = source.layout
    if source.up_half is not None:
        w1 = _both_halves(w1, _stacked(source.up_half, source.compute_dtype))
        layout = replace(layout, apart=isinstance(w1, GateUp))
    b1, b2 = map(_fp32, (source.b1, source.b2))
    shapes = [tuple(each.shape) for each in (w1, w2)]
    if layout.transposed:
        shapes = [(*shape[:-2], shape[-1], shape[-2]) for shape in shapes]
    biases = (None if bias is None else tuple(bias.shape) for bias in (b1, b2))
    check_shapes(*shapes, *biases, activation)
    return EngineWeights(w1, w2, w1, w2, b1, b2, layout=layout)


def _both_halves(gate: Tensor, up: Tensor) -> Tensor | GateUp:
    """A w1 whose halves the kernels can read, as two tensors or joined by a copy."""
    if gate.stride() == up.stride() and int(gate.shape[1]) % _DEPTH == 0:
        return GateUp(gate, up)
    return torch.cat([gate, up], 1)


def are_lent(weights: EngineWeights, source: WeightSource) -> bool:
    """Whether none was copied."""
    if isinstance(source.up, StackedMatrices) and isinstance(source.down, StackedMatrices):
        halves = () if source.up_half is None else (source.up_half,)
        given = [side.stacked for side in (source.up, *halves, source.down)]
        read = [*tensors_of(weights.w1), *tensors_of(weights.w2)]
        return same_objects(given, read)
    return isinstance(weights.w1, ExpertMatrices)


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else aligned(bias.to(torch.float32))


def _stay_apart(source: WeightSource) -> bool:
    """Whether these are a tensor of each expert that the kernels can read."""
    if isinstance(source.up, StackedMatrices) or isinstance(source.down, StackedMatrices):
        return False
    dtype, wanted = source.anchor.dtype, source.compute_dtype
    fits = may_stay_apart(len(source.up), dtype) and wanted in (None, dtype)
    inner = int(source.up[0].shape[-1]), int(source.down[0].shape[-1])
    aligned_rows = all(size % _ITEMS == 0 for size in inner)
    return fits and aligned_rows and functools.reduce(or_, source.pointers) % _BYTES == 0


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    weight = matrices.stacked if isinstance(matrices, StackedMatrices) else stack(list(matrices))
    if dtype is not None and weight.dtype != dtype:
        weight = weight.to(dtype)
    *strides, last = (int(stride) for stride in weight.stride())
    # An expanded weight has a stride of 0, which the driver refuses.
    fits = last == 1 and all([stride > 0 and stride % _ITEMS == 0 for stride in strides])
    if fits and data_ptr(weight) % _BYTES == 0:
        return weight
    return aligned(weight)  # type: ignore[no-any-return]


# By `kind_of` stacked weights that were read in place: the fields of `EngineWeights` but for
# tensors. The settings stay here, so that no others can have their id.
_known: dict[Any, tuple[EngineSettings, dict[str, Any]]] = {}
MOST_KNOWN = 256
_TENSORS = frozenset({"w1", "w2", "w1_dgrad", "w2_dgrad", "b1", "b2"})


def kind_of(
    weights: StackedWeights,
    layout: WeightLayout,
    dtype: torch.dtype | None,
    settings: EngineSettings,
) -> tuple[Any, ...]:
    """All that decides how these are read, but for addresses. dtype: see `Engine.read_stacked`."""
    given, w2, b1, b2 = weights
    # By class, because `isinstance` is a call more, and every forward and backward comes here.
    halves: Any = given if type(given) is GateUp else (given, None)
    w1, up = halves
    of_up = None if up is None else (up.shape, up.stride(), up.dtype)
    of_biases = None if b1 is None else b1.shape, None if b2 is None else b2.shape
    of_call = layout.transposed, layout.split_half, dtype, id(settings)
    first = w1.shape, w1.stride(), w1.dtype, w1.device
    return *first, of_up, w2.shape, w2.stride(), w2.dtype, *of_biases, *of_call


def recognised(kind: tuple[Any, ...], weights: StackedWeights) -> EngineWeights | None:
    """These, or None where their kind was not seen before, or the copy engine cannot read them."""
    w1, w2, b1, b2 = weights
    found = _known.get(kind)
    if found is None:
        return None
    addresses = data_ptr(w2) | (
        data_ptr(w1.gate) | data_ptr(w1.up) if type(w1) is GateUp else data_ptr(w1)
    )
    if addresses % _BYTES:
        return None
    if b1 is not None:
        b1, b2 = _fp32(b1), _fp32(b2)
    made = EngineWeights.__new__(EngineWeights)
    # Sizes and kernels are those of before.
    own = {"w1": w1, "w2": w2, "w1_dgrad": w1, "w2_dgrad": w2, "b1": b1, "b2": b2}
    made.__dict__.update(found[1], **own)
    return made


def remember(kind: tuple[Any, ...], settings: EngineSettings, made: EngineWeights) -> None:
    """Keep the fields of weights that were read in place, for others of their kind."""
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _ = made.native_shapes  # asked, so that all sizes are kept
    kept = {name: value for name, value in made.__dict__.items() if name not in _TENSORS}
    _known[kind] = settings, kept
