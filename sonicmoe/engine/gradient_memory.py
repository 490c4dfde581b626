"""Where the gradient memory of one projection lies: a tensor of each expert or one for all, in the
layout of its parameter. And why an addition there is impossible.

Legend: E experts, M rows and N columns of a native matrix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..interop import data_ptr, device_name, dtype_name
from ..layouts import WeightLayout

Tensor = torch.Tensor
_FP32 = 4  # bytes
_TMA_BYTES = 16  # the copy engine's addresses and strides are multiples of it


class Place(NamedTuple):
    """Where one expert's native matrix `[M, N]` lies: an address, and strides in elements.

    Gate and up rows are taken as two parts where they lie apart: `stride_m` then strides over the
    rows of one part, and `stride_part` leads from a gate row to its up row. Address 0: nobody wants
    the gradient.
    """

    address: int
    stride_m: int
    stride_part: int
    stride_n: int


NOWHERE = Place(0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """The gradient memory of one projection, where its parameters have it.

    tensors: a matrix of each expert, or one stacked `[E, ..]` tensor; any strides. None where a
        parameter is frozen. The tensor is `[2, E, I, H]` where gate and up are `layout.apart`.
    layout: how each matrix lies. `split_half` says nothing of a down-projection.
    num_experts: E.
    """

    tensors: Sequence[Tensor | None]
    layout: WeightLayout
    num_experts: int
    is_stacked: bool

    @classmethod
    def per_expert(cls, tensors: Sequence[Tensor | None], layout: WeightLayout) -> WeightTarget:
        """Of E matrices."""
        return cls(tensors, layout, len(tensors), False)

    @classmethod
    def stacked(cls, tensor: Tensor | None, num_experts: int, layout: WeightLayout) -> WeightTarget:
        """Of one `[E, ..]` tensor."""
        return cls((tensor,), layout, num_experts, True)

    @property
    def is_wanted(self) -> bool:
        """Whether any parameter is trainable."""
        return self.first is not None

    @property
    def first(self) -> Tensor | None:
        """The first tensor that there is; all have one dtype and one size."""
        tensor = self.tensors[0]
        if tensor is not None:  # as nearly always
            return tensor
        return next((tensor for tensor in self.tensors if tensor is not None), None)

    @property
    def arrangement(self) -> Hashable:
        """How the tensors belong together: with their places, it says where gradients are added."""
        return self.layout, self.num_experts, self.is_stacked

    def matrix(self, expert: int) -> Tensor | None:
        """One expert's, a view of a stacked tensor; None where it is frozen."""
        if not self.is_stacked:
            return self.tensors[expert]
        stacked = self.tensors[0]
        if stacked is None:
            return None
        return stacked[:, expert] if self.is_apart else stacked[expert]

    @property
    def is_apart(self) -> bool:
        """Whether the tensor is gate and up, `[2, E, I, H]`."""
        # Asked of the memory, because dw2 has the layout of dw1.
        first = self.first
        return first is not None and len(first.shape) == 4

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Addresses, shapes and strides: equal ones name the same memory in the same order."""
        places = [
            None if t is None else (data_ptr(t), tuple(t.shape), tuple(t.stride()))
            for t in self.tensors
        ]
        return tuple(places)

    @property
    def native_size(self) -> tuple[int, int]:
        """M and N of a native matrix; zeros where nobody wants the gradient."""
        tensor = self.first
        if tensor is None:
            return 0, 0
        m, n = (int(size) for size in tensor.shape[-2:])
        m = 2 * m if self.is_apart else m
        return (n, m) if self.layout.transposed else (m, n)

    def places(self, split: bool) -> list[Place]:
        """Where each expert's matrix lies; `split`: as two parts."""
        if not self.is_stacked:
            return [NOWHERE if t is None else self._place(t, split) for t in self.tensors]
        stacked = self.tensors[0]
        if stacked is None:
            return [NOWHERE] * self.num_experts
        # One view for each expert would take the host longer than the launch.
        first = self._place(stacked, split)
        step = stacked.element_size() * int(stacked.stride()[-3])
        return [Place(first.address + e * step, *first[1:]) for e in range(self.num_experts)]

    def _place(self, tensor: Tensor, split: bool) -> Place:
        along_m, along_n = (int(stride) for stride in tensor.stride()[-2:])
        if self.is_apart:
            return Place(data_ptr(tensor), along_m, int(tensor.stride()[0]), along_n)
        rows = int(tensor.shape[-2])
        if self.layout.transposed:
            along_m, along_n, rows = along_n, along_m, int(tensor.shape[-1])
        return Place(data_ptr(tensor), along_m, rows // 2 * along_m if split else 0, along_n)


def misfit(tensor: Tensor, wanted: tuple[int, ...], device: str) -> str | None:
    """Why gradients of this shape, computed on this device, cannot be added to a tensor by any engine."""
    if tensor.dtype != torch.float32:
        return f"is {dtype_name(tensor.dtype)}; needed: float32"
    if tuple(tensor.shape) != wanted:
        return f"has shape {tuple(tensor.shape)}; needed: {wanted}"
    if device_name(tensor) != device:
        return f"is on {device_name(tensor)}, and gradients are computed on {device}"
    # FSDP frees the memory of a living tensor.
    if data_ptr(tensor) == 0:
        return "has no memory: it was freed"
    # Axes in ascending order of strides: each must step over all that lies below it.
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return f"has strides {tuple(tensor.stride())}, under which its elements overlap"
        reach += (int(size) - 1) * int(stride)
    return None


def tma_misfit(tensor: Tensor) -> str | None:
    """Why the GPU's copy engine (TMA) cannot add to a tensor."""
    # The stride of an axis of one element is never used.
    strides = [int(s) for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    axis = contiguous_axis(tensor)
    if axis < 0:
        return f"has strides {tuple(tensor.stride())}; needed: 1 in one axis of its matrices"
    strides.remove(1)
    if any(_FP32 * stride % _TMA_BYTES for stride in strides):
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
    return first, first + _FP32 * (1 + sum((int(size) - 1) * int(stride) for stride, size in axes))
