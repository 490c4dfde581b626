"""The weights of a layer where they lie: E matrices of each projection, for engines to read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from .errors import ShapeError
from .interop import data_ptr, numel
from .layouts import NATIVE, GateUp, WeightLayout, stack

Tensor = torch.Tensor


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both hold the same objects in one order. Nothing is compared by value: tensors and a
    caller's modules may have an `==` of their own.
    """
    return len(some) == len(others) and all(map(is_, some, others))


class StackedMatrices(Sequence[Tensor]):
    """The E matrices of a stacked weight, split off when asked for, because E views take longer
    than a launch, which reads addresses only.

    Readers get contiguous matrices. A stacked weight that is not contiguous is copied at the first
    reading, and not before: a cache that finds everything in order reads nothing.

    stacked: the weight as it was given.
    """

    def __init__(self, stacked: Tensor) -> None:
        self.stacked = stacked
        self._contiguous: Tensor | None = None

    def __len__(self) -> int:
        return int(self.stacked.shape[0])

    def __getitem__(self, index: Any) -> Any:
        """A view."""
        return self._readable()[index]

    def __iter__(self) -> Iterator[Tensor]:
        """All views, in one operation."""
        return iter(self._readable().unbind(0))

    def addresses(self) -> range:
        """Addresses of the matrices, without a view of each."""
        readable = self._readable()
        start = data_ptr(readable)
        # A weight of no elements has a step of 0 bytes, which `range` refuses.
        step = max(1, numel(readable) // len(self) * readable.element_size())
        return range(start, start + len(self) * step, step)

    def _readable(self) -> Tensor:
        # Of a contiguous weight this is the weight itself, and no copy.
        if self._contiguous is None:
            self._contiguous = self.stacked.contiguous()
        return self._contiguous


def _addresses(matrices: Sequence[Tensor]) -> Sequence[int]:
    if type(matrices) is StackedMatrices:
        return matrices.addresses()
    return tuple(map(data_ptr, matrices))


def _size(matrices: Sequence[Tensor], axis: int) -> int:
    """The size of every matrix along axis -1 or -2."""
    first = matrices.stacked if type(matrices) is StackedMatrices else matrices[0]
    return int(first.shape[axis])


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """One `[E, ...]` tensor: the caller's own memory where it is stacked already."""
    return matrices.stacked if isinstance(matrices, StackedMatrices) else stack(list(matrices))


@dataclass(frozen=True, eq=False)
class WeightSource:
    """The user's weights where they lie: E matrices of each projection, views of one stacked tensor
    or parameters of their own. Engines read them here; nothing is copied before an engine asks.

    up, down: one contiguous matrix per expert, as `layout` says.
    up_half: where `layout.apart`, the up rows `[I, H]` of each expert; `up` are the gate rows then.
    b1 `[E, N1]`, b2 `[E, H]`: both or neither.
    compute_dtype: an engine that does not quantise casts the weights to it; None keeps their own.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    layout: WeightLayout = NATIVE
    b1: Tensor | None = None
    b2: Tensor | None = None
    compute_dtype: torch.dtype | None = None
    up_half: StackedMatrices | None = None

    def __post_init__(self) -> None:
        """Refuse sources that no engine could read in place."""
        if not len(self.up) == len(self.down) > 0:
            words = f"{len(self.up)} up and {len(self.down)} down matrices"
            raise ShapeError(f"{words}; needed: one of each per expert")

    @classmethod
    def stacked(
        cls,
        w1: Tensor | GateUp,
        w2: Tensor,
        b1: Tensor | None = None,
        b2: Tensor | None = None,
        layout: WeightLayout = NATIVE,
        compute_dtype: torch.dtype | None = None,
    ) -> WeightSource:
        """The source of `[E, ..]` weights."""
        # Detached: engines compute outside autograd, and a view of a leaf would join the graph.
        halves: Any = w1 if layout.apart else (w1, None)
        first, second = halves
        up, down = StackedMatrices(first.detach()), StackedMatrices(w2.detach())
        up_half = None if second is None else StackedMatrices(second.detach())
        b1, b2 = (None if bias is None else bias.detach() for bias in (b1, b2))
        return cls(up, down, layout, b1, b2, compute_dtype, up_half)

    @property
    def places(self) -> tuple[Sequence[int], ...]:
        """Addresses of the up matrices (or of gate halves and of up halves), and of the down matrices;
        those of stacked ones are ranges, which are compared without a look at each.
        """
        # Spelt out, because every call of a layer asks.
        up, down = _addresses(self.up), _addresses(self.down)
        return (up, down) if self.up_half is None else (up, _addresses(self.up_half), down)

    @property
    def pointers(self) -> tuple[int, ...]:
        """All of `places` in one row."""
        return tuple(itertools.chain(*self.places))

    @property
    def is_copied(self) -> bool:
        """Whether engines read copies of a weight that is not contiguous, gone after the call."""
        matrices = (m for m in self._every if isinstance(m, StackedMatrices))
        return not all(m.stacked.is_contiguous() for m in matrices)

    @property
    def _every(self) -> tuple[Sequence[Tensor], ...]:
        halves = () if self.up_half is None else (self.up_half,)
        return self.up, *halves, self.down

    @property
    def anchor(self) -> Tensor:
        """A tensor that lies where the weights lie, for questions about device and stream."""
        # By class: `isinstance` asks a `Sequence` in Python, and every call of a layer comes here.
        return self.up.stacked if type(self.up) is StackedMatrices else self.up[0]

    @functools.cached_property
    def n1(self) -> int:
        """Rows of a native w1."""
        rows = _size(self.up, -1 if self.layout.transposed else -2)
        return 2 * rows if self.layout.apart else rows

    @functools.cached_property
    def hidden_size(self) -> int:
        return _size(self.up, -2 if self.layout.transposed else -1)

    @functools.cached_property
    def intermediate_size(self) -> int:
        return _size(self.down, -2 if self.layout.transposed else -1)

    def native(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """`(w1 [E, N1, H], w2 [E, H, I], b1, b2)`, contiguous, native, in the weights' dtypes.

        Fresh memory but for stacked weights that are native already: those stay the user's own, so
        that autograd notices a write to them and no second copy of a model exists.
        """
        up = _stacked(self.up)
        w1 = up if self.up_half is None else GateUp(up, self.up_half.stacked)
        w1 = self.layout.native_w1(w1).contiguous()
        w2 = self.layout.native_w2(_stacked(self.down)).contiguous()
        return w1, w2, None if self.b1 is None else self.layout.native_b1(self.b1), self.b2
