"""Where the gradients of one projection lie: a tensor of each expert or one for all, in the layout of
its parameter. The GEMMs of every engine, the flush and plain operations read this one table.

Legend: E experts, M rows and N columns of a native matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from ..interop import data_ptr
from ..layouts import WeightLayout
from .settings import GradientMode

Tensor = torch.Tensor
_TMA_BYTES = 16  # the copy engine's addresses and strides are multiples of it


class MatrixPlace(NamedTuple):
    """Where one expert's native matrix `[M, N]` lies: an address, and strides in elements.

    Gate and up rows may be taken as two parts: `stride_m` then strides over the rows of one part, and
    `stride_part` leads from a gate row to its up row. Address 0: nobody wants the gradient.
    """

    address: int
    stride_m: int
    stride_part: int
    stride_n: int


NOWHERE = MatrixPlace(0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class GradientPlaces:
    """The gradient memory of one projection, where its parameters have it.

    tensors: a matrix of each expert, or one stacked `[E, ..]` tensor; any strides, one dtype and one
        size. None where a parameter is frozen. The tensor is `[2, E, I, H]` where gate and up are
        `layout.apart`.
    layout: how each matrix lies. `split_half` says nothing of a down-projection.
    num_experts: E.
    """

    tensors: Sequence[Tensor | None]
    layout: WeightLayout
    num_experts: int
    is_stacked: bool

    @classmethod
    def per_expert(cls, tensors: Sequence[Tensor | None], layout: WeightLayout) -> GradientPlaces:
        return cls(tensors, layout, len(tensors), False)

    @classmethod
    def stacked(
        cls, tensor: Tensor | None, num_experts: int, layout: WeightLayout
    ) -> GradientPlaces:
        """The places of the matrices of one `[E, ..]` tensor."""
        return cls((tensor,), layout, num_experts, True)

    @property
    def first(self) -> Tensor | None:
        """The first tensor that there is; None where nobody wants the gradient."""
        tensor = self.tensors[0]
        if tensor is not None:  # as nearly always
            return tensor
        return next((tensor for tensor in self.tensors if tensor is not None), None)

    @property
    def is_apart(self) -> bool:
        """Whether the tensor is gate and up, `[2, E, I, H]`."""
        # Asked of the memory, because dw2 has the layout of dw1.
        return self.first is not None and len(self.first.shape) == 4

    @property
    def native_size(self) -> tuple[int, int]:
        """M and N of a native matrix; zeros where nobody wants the gradient."""
        if self.first is None:
            return 0, 0
        m, n = (int(size) for size in self.first.shape[-2:])
        m = 2 * m if self.is_apart else m
        return (n, m) if self.layout.transposed else (m, n)

    def matrix(self, expert: int) -> Tensor | None:
        """One expert's, a view of a stacked tensor; None where it is frozen."""
        tensor = self.tensors[0 if self.is_stacked else expert]
        if tensor is None or not self.is_stacked:
            return tensor
        return tensor[:, expert] if self.is_apart else tensor[expert]

    def places(self, parts: bool) -> list[MatrixPlace]:
        """Where each expert's matrix lies. parts: its gate and up rows, which lie in halves or in
        turns as the layout says, are taken as two parts.
        """
        if not self.is_stacked:
            return [NOWHERE if t is None else self._place(t, parts) for t in self.tensors]
        stacked = self.tensors[0]
        if stacked is None:
            return [NOWHERE] * self.num_experts
        # One view for each expert would take the host longer than the launch.
        address, *strides = self._place(stacked, parts)
        step = stacked.element_size() * int(stacked.stride()[-3])
        return [MatrixPlace(address + e * step, *strides) for e in range(self.num_experts)]

    def _place(self, tensor: Tensor, parts: bool) -> MatrixPlace:
        along_m, along_n = (int(stride) for stride in tensor.stride()[-2:])
        if self.is_apart:
            return MatrixPlace(data_ptr(tensor), along_m, int(tensor.stride()[0]), along_n)
        rows = int(tensor.shape[-2])
        if self.layout.transposed:
            along_m, along_n, rows = along_n, along_m, int(tensor.shape[-1])
        if not parts:
            return MatrixPlace(data_ptr(tensor), along_m, 0, along_n)
        if self.layout.split_half:
            return MatrixPlace(data_ptr(tensor), along_m, rows // 2 * along_m, along_n)
        return MatrixPlace(data_ptr(tensor), 2 * along_m, along_m, along_n)


class WgradOutput(IntEnum):
    """What becomes of the sums of wgrad; the numbers of `wgrad_places.cuh`."""

    ADD_F32 = 0
    WRITE_F32 = 1
    WRITE_BF16 = 2


# By the dtype of the memory.
WRITTEN = {torch.float32: WgradOutput.WRITE_F32, torch.bfloat16: WgradOutput.WRITE_BF16}
ADDED = {torch.float32: WgradOutput.ADD_F32}


def wgrad_destination(
    places: GradientPlaces, make: Callable[..., Any], mode: GradientMode, *, parts: bool
) -> Any:
    """Where the GEMMs for Hopper leave the sums of one projection, in the form of the copy engine:
    addresses and strides, and no memory. make: `wgrad_destination` of a module of the GEMMs. parts:
    gate and up rows are two parts.
    """
    outputs = WRITTEN if mode is GradientMode.FRESH else ADDED
    output = outputs[torch.float32 if places.first is None else places.first.dtype]
    numbers = [number for place in places.places(parts) for number in place]
    return make(*places.native_size, parts, numbers, output)


def tma_misfit(tensor: Tensor) -> str | None:
    """Why the GPU's copy engine (TMA) cannot add to a tensor."""
    # The stride of an axis of one element is never used.
    strides = [int(s) for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    if contiguous_axis(tensor) < 0:
        return f"has strides {tuple(tensor.stride())}; needed: 1 in one axis of its matrices"
    strides.remove(1)
    if any(tensor.element_size() * stride % _TMA_BYTES for stride in strides):
        return (
            f"has strides {tuple(tensor.stride())}; needed: multiples of {_TMA_BYTES} bytes in all "
            "axes but the contiguous one"
        )
    if data_ptr(tensor) % _TMA_BYTES:
        return f"begins at {data_ptr(tensor):#x}; needed: a multiple of {_TMA_BYTES} bytes"
    return None


def contiguous_axis(tensor: Tensor) -> int:
    """0 or 1, an axis of each matrix; -1 where there is none."""
    strides = list(tensor.stride()[-2:])
    return strides.index(1) if 1 in strides else -1


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one behind the last."""
    first = data_ptr(tensor)
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 1 + sum((int(size) - 1) * int(stride) for stride, size in axes)
    return first, first + tensor.element_size() * reach


def first_overlap(extents: Iterable[tuple[int, int, Any]]) -> tuple[Any, Any] | None:
    """The names of two extents that overlap; None where no two do. extents: first address, the one
    behind the last, and a name.
    """
    # In ascending order of addresses an overlap of any two shows between neighbours.
    for one, other in itertools.pairwise(sorted(extents)):
        if one[1] > other[0]:
            return one[2], other[2]
    return None


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether the strides lead to one element of the memory by two ways."""
    # Axes in ascending order of strides: each must step over all that lies below it.
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (int(size) - 1) * int(stride)
    return False
