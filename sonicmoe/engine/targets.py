"""Memory that weight gradients are left in: accumulators of our own in the native layout; the
parameters' own `main_grad`, each in the layout of its parameter; or fresh memory in dtype and layout
of the parameters, which is written instead of added to.

Legend: E experts, H hidden, I intermediate, N1 = 2I (gated) or I.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import ConfigError
from ..interop import data_ptr, device_name, dtype_name, numel
from ..layouts import WeightLayout, stack
from .footprint import Footprint

Tensor = torch.Tensor
Value = TypeVar("Value")
_FP32 = 4  # bytes
_TMA_BYTES = 16  # the copy engine's addresses and strides are multiples of it


class GradientTargets(ABC):
    """Memory that `Engine.backward_dw` adds fp32 weight gradients to. An expert without tokens is
    left untouched.

    The gradient store makes targets and decides what becomes of them after a backward; an engine
    only adds. The gradients are dw1 `[E, N1, H]`, dw2 `[E, H, I]` and, where the weights have
    biases, db1 `[E, N1]` and db2 `[E, H]`.

    adding: an engine sets this before the first addition of a backward and clears it after the
        last. It takes all memory and loads all kernels before, so that running out of memory leaves
        the targets as they were.
    """

    adding: bool = False

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """The tensors that are added to, by the name of the gradient."""

    def wants(self, name: str) -> bool:
        """Whether anybody wants this gradient; what nobody wants need not be computed."""
        return True

    @property
    @abstractmethod
    def anchor(self) -> Tensor:
        """One of them, for questions about device and stream."""

    @abstractmethod
    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        """One expert's gradient, native, in the layout that `add` takes. Memory that this needs is
        taken here, so that `add` needs none.
        """

    @abstractmethod
    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        """Add one expert's arranged gradient by plain tensor operations."""

    @abstractmethod
    def sums(self, name: str) -> Tensor | None:
        """All that was added to one gradient so far, in the native layout; None where nobody wants
        that gradient.
        """

    @abstractmethod
    def replace(self, name: str, sums: Tensor) -> None:
        """Write other sums, in the native layout, over those that are there."""

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.named().values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.element_size() * numel(tensor) for tensor in self.tensors())


@dataclass(eq=False)
class NativeBuffer(GradientTargets):
    """Accumulators in the native layout, which every engine can add to.

    dw1 `[E, N1, H]`, dw2 `[E, H, I]`, db1 `[E, N1]`, db2 `[E, H]` (the biases' are None when the
    weights have none).
    """

    dw1: Tensor
    dw2: Tensor
    db1: Tensor | None = None
    db2: Tensor | None = None

    @classmethod
    def zeros(
        cls, num_experts: int, n1: int, hidden: int, intermediate: int, bias: bool, device: Any
    ) -> NativeBuffer:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            dw1=zeros(num_experts, n1, hidden),
            dw2=zeros(num_experts, hidden, intermediate),
            db1=zeros(num_experts, n1) if bias else None,
            db2=zeros(num_experts, hidden) if bias else None,
        )

    @property
    def anchor(self) -> Tensor:
        return self.dw1

    def named(self) -> dict[str, Tensor]:
        every = {"dw1": self.dw1, "dw2": self.dw2, "db1": self.db1, "db2": self.db2}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        return gradient

    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        self.named()[name][expert].add_(gradient)

    def sums(self, name: str) -> Tensor:
        return self.named()[name]

    def replace(self, name: str, sums: Tensor) -> None:
        self.named()[name].copy_(sums)


def native_buffer(targets: GradientTargets) -> NativeBuffer:
    """The targets of an engine that adds to no other kind.

    Raises:
        ConfigError: they are of another kind.
    """
    if not isinstance(targets, NativeBuffer):
        raise ConfigError(
            f"gradient targets are {type(targets).__name__}; this engine adds to a NativeBuffer"
        )
    return targets


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
        parameter is frozen.
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
        return any(map(is_not, self.tensors, repeat(None)))

    @property
    def arrangement(self) -> Hashable:
        """How the tensors belong together: with their places, it says where gradients are added."""
        return self.layout, self.num_experts, self.is_stacked, len(self.tensors)

    def matrix(self, expert: int) -> Tensor | None:
        """One expert's, a view of a stacked tensor; None where it is frozen."""
        if not self.is_stacked:
            return self.tensors[expert]
        stacked = self.tensors[0]
        return None if stacked is None else stacked[expert]

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Addresses, shapes and strides: equal ones name the same memory in the same order."""
        return tuple(
            None if t is None else (data_ptr(t), tuple(t.shape), tuple(t.stride()))
            for t in self.tensors
        )

    @property
    def native_size(self) -> tuple[int, int]:
        """M and N of a native matrix; zeros where nobody wants the gradient."""
        tensor = next((tensor for tensor in self.tensors if tensor is not None), None)
        if tensor is None:
            return 0, 0
        m, n = (int(size) for size in tensor.shape[-2:])
        return (n, m) if self.layout.transposed else (m, n)

    def places(self, split: bool) -> list[Place]:
        """Where each expert's matrix lies; `split`: as two parts."""
        if not self.is_stacked:
            return [NOWHERE if t is None else self._place(t, split) for t in self.tensors]
        stacked = self.tensors[0]
        if stacked is None:
            return [NOWHERE] * self.num_experts
        first = self._place(stacked, split)
        step = stacked.element_size() * int(stacked.stride()[0])
        return [first._replace(address=first.address + e * step) for e in range(self.num_experts)]

    def _place(self, tensor: Tensor, split: bool) -> Place:
        along_m, along_n = (int(stride) for stride in tensor.stride()[-2:])
        rows = int(tensor.shape[-2])
        if self.layout.transposed:
            along_m, along_n, rows = along_n, along_m, int(tensor.shape[-1])
        return Place(data_ptr(tensor), along_m, rows // 2 * along_m if split else 0, along_n)


@dataclass(eq=False)
class ParameterTargets(GradientTargets):
    """The parameters' own memory: every gradient is added where its parameter has it, in its own
    layout, and no memory of ours is between.

    up: of dw1, matrices `[N1, H]` or `[H, N1]`. down: of dw2, `[H, I]` or `[I, H]`.
    footprint: see `recognise`.
    """

    up: WeightTarget
    down: WeightTarget
    footprint: Footprint | None = None

    def recognise(self, last: Footprint | None) -> Footprint:
        """Look where the memory lies, and take over what was found out about `last` where it is the
        same memory: reasons of `problem`, `copy_engine_problem` and engines, and the destinations
        that an engine has made of addresses.

        last: what the targets of the layer's previous backward returned here; None at the first.
        """
        arrangement = self.up.arrangement, self.down.arrangement
        tensors = [*self.up.tensors, *self.down.tensors]
        again = None if last is None else last.seen_again(arrangement, tensors)
        self.footprint = again or Footprint(arrangement, tensors)
        return self.footprint

    def once(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """What `find` returns, which depends on where the memory lies and on `key` alone; called
        once of recognised memory.
        """
        return find() if self.footprint is None else self.footprint.once(key, find)

    @property
    def anchor(self) -> Tensor:
        first = self.up.tensors[0]
        if first is not None:  # as nearly always
            return first
        return next(
            tensor for tensor in (*self.up.tensors, *self.down.tensors) if tensor is not None
        )

    def named(self) -> dict[str, Tensor]:
        return {
            name if weight.is_stacked else f"{name}[{index}]": tensor
            for name, weight in self._weights()
            for index, tensor in enumerate(weight.tensors)
            if tensor is not None
        }

    def wants(self, name: str) -> bool:
        return self._weight(name).is_wanted

    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        layout = self._weight(name).layout
        return layout.user_w1(gradient) if name == "dw1" else layout.user_w2(gradient)

    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        matrix = self._weight(name).matrix(expert)
        if matrix is not None:
            matrix.add_(gradient)

    def sums(self, name: str) -> Tensor | None:
        """A copy, with zeros for frozen parameters."""
        weight = self._weight(name)
        if not weight.is_wanted:
            return None
        back = weight.layout.native_w1 if name == "dw1" else weight.layout.native_w2
        matrices = [weight.matrix(expert) for expert in range(weight.num_experts)]
        like = next(matrix for matrix in matrices if matrix is not None)
        return back(stack([torch.zeros_like(like) if m is None else m for m in matrices]))

    def replace(self, name: str, sums: Tensor) -> None:
        weight = self._weight(name)
        for expert in range(weight.num_experts):
            matrix = weight.matrix(expert)
            if matrix is not None:
                matrix.copy_(self.arranged(name, sums[expert]))

    def problem(self, n1: int, hidden: int, intermediate: int, device: str) -> str | None:
        """Why gradients of these sizes, computed on this device (by name), cannot be added here by
        any engine: one sentence, or None.
        """
        key = ("problem", n1, hidden, intermediate, device)
        return self.once(key, lambda: self._problem(n1, hidden, intermediate, device))

    def _problem(self, n1: int, hidden: int, intermediate: int, device: str) -> str | None:
        for name, weight in self._weights():
            native = (n1, hidden) if name == "dw1" else (hidden, intermediate)
            wanted: tuple[int, ...] = native[::-1] if weight.layout.transposed else native
            if weight.is_stacked:
                wanted = (weight.num_experts, *wanted)
            for index, tensor in enumerate(weight.tensors):
                found = None if tensor is None else _misfit(tensor, wanted, device)
                if found is not None:
                    return f"{_where(name, weight, index)} {found}"
        return None

    def copy_engine_problem(self) -> str | None:
        """Why the GPU's copy engine (TMA) cannot add here, once `problem` has found nothing: one
        sentence, or None.
        """
        return self.once("copy engine", self._copy_engine_problem)

    def _copy_engine_problem(self) -> str | None:
        extents = []
        for name, weight in self._weights():
            contiguous: set[int] = set()
            for index, tensor in enumerate(weight.tensors):
                if tensor is None:
                    continue
                where = _where(name, weight, index)
                found = _tma_misfit(tensor)
                if found is not None:
                    return f"{where} {found}"
                contiguous.add(_contiguous_axis(tensor))
                extents.append((*_extent(tensor), where))
            if len(contiguous) > 1:
                return f"the experts' {_NAMES[name]} are contiguous along different axes"
        # In ascending order of addresses an overlap of any two shows between neighbours.
        for one, other in itertools.pairwise(sorted(extents)):
            if one[1] > other[0]:
                return f"{one[2]} overlaps {other[2]}"
        return None

    def _weights(self) -> tuple[tuple[str, WeightTarget], ...]:
        return ("dw1", self.up), ("dw2", self.down)

    def _weight(self, name: str) -> WeightTarget:
        return self.up if name == "dw1" else self.down


@dataclass(eq=False)
class FreshTargets(ParameterTargets):
    """Memory that was made for one backward, whose gradients autograd accumulates: in the
    parameters' dtype and layout, and unwritten. `Engine.backward_dw` writes all of it, zeros for
    experts without tokens.

    The fp32 sums are rounded once, as they leave the GEMM: no accumulators, and no pass over them.
    """

    @classmethod
    def fits(cls, dtypes: Iterable[Any]) -> bool:
        """Whether gradients of these dtypes can be written."""
        return all(dtype in FRESH_DTYPES for dtype in dtypes)

    @classmethod
    def like(cls, targets: ParameterTargets) -> FreshTargets:
        """Of the same memory."""
        return cls(targets.up, targets.down)


FRESH_DTYPES = (torch.bfloat16, torch.float32)
_NAMES = {"dw1": "up-projection gradients", "dw2": "down-projection gradients"}


def _where(name: str, weight: WeightTarget, index: int) -> str:
    projection = "up" if name == "dw1" else "down"
    if weight.is_stacked:
        return f"the gradient memory of the {projection}-projections"
    return f"the gradient memory of expert {index}'s {projection}-projection"


def _misfit(tensor: Tensor, wanted: tuple[int, ...], device: str) -> str | None:
    if tensor.dtype != torch.float32:
        return f"is {dtype_name(tensor.dtype)}; needed: float32"
    if tuple(tensor.shape) != wanted:
        return f"has shape {tuple(tensor.shape)}; needed: {wanted}"
    if device_name(tensor) != device:
        return f"is on {device_name(tensor)}, and gradients are computed on {device}"
    if data_ptr(tensor) == 0:
        return "has no memory: it was freed"
    # Axes in ascending order of strides: each must step over all that lies below it.
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return f"has strides {tuple(tensor.stride())}, under which its elements overlap"
        reach += (int(size) - 1) * int(stride)
    return None


def _tma_misfit(tensor: Tensor) -> str | None:
    strides = [int(s) for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    axis = _contiguous_axis(tensor)
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


def _contiguous_axis(tensor: Tensor) -> int:
    """0 or 1, an axis of each matrix; -1 where there is none."""
    strides = list(tensor.stride()[-2:])
    return strides.index(1) if 1 in strides else -1


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one behind the last."""
    first = data_ptr(tensor)
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return first, first + _FP32 * (1 + sum((int(size) - 1) * int(stride) for stride, size in axes))
