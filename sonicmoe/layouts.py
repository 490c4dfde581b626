"""Index maps between weight layouts: pure, differentiable-free, exact (they move bytes, they do no
arithmetic).

Native layouts (what every engine reads and accumulates into):
    w1 [E, N1, H]   up-projection, K-major; N1 = 2I for gated activations with rows interleaved (row 2i = gate_i, row 2i+1 = up_i), else I
    w2 [E, H, I]    down-projection, K-major
User layouts:
    split-half, per expert  `up_gate_proj.weight [H, 2I]` (columns [0, I) gate, [I, 2I) up) and `down_proj.weight [I, H]`
    fused                   `weight1 [E, H, 2I]` split-half and `weight2 [E, I, H]`

Interleaving keeps a (gate, up) pair in one thread's registers on the GPU, so the gated activation
needs no exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import LayoutError, ShapeError, expect
from .interop import data_ptr, numel

Tensor = torch.Tensor


def interleave_gate_up(split: Tensor) -> Tensor:
    """Rows [gate_0..gate_I-1, up_0..up_I-1] -> [gate_0, up_0, gate_1, up_1, ...] along the
    second-to-last axis ([..., 2I, H]).
    """
    *lead, n, h = split.shape
    expect(
        n % 2 == 0,
        LayoutError,
        f"interleave_gate_up needs an even number of rows (2I), got shape {tuple(split.shape)}",
    )
    pairs = split.reshape([*lead, 2, n // 2, h])
    return pairs.transpose(-3, -2).contiguous().reshape([*lead, n, h])


def deinterleave_gate_up(interleaved: Tensor) -> Tensor:
    """Inverse of `interleave_gate_up` ([..., 2I, H] -> [..., 2I, H])."""
    *lead, n, h = interleaved.shape
    expect(
        n % 2 == 0,
        LayoutError,
        f"deinterleave_gate_up needs an even number of rows (2I), got shape {tuple(interleaved.shape)}",
    )
    pairs = interleaved.reshape([*lead, n // 2, 2, h])
    return pairs.transpose(-3, -2).contiguous().reshape([*lead, n, h])


def native_w1_from_split_half(weight: Tensor, gated: bool) -> Tensor:
    """`[..., H, 2I]` split-half (or `[..., H, I]` ungated) -> native `[..., N1, H]`."""
    rows = _transposed(weight)
    return interleave_gate_up(rows) if gated else rows


def split_half_from_native_w1(native: Tensor, gated: bool) -> Tensor:
    """Inverse of `native_w1_from_split_half`; serves gradients as well as weights."""
    return _transposed(deinterleave_gate_up(native) if gated else native)


def native_w2_from_user(weight: Tensor) -> Tensor:
    """`[..., I, H]` -> native `[..., H, I]`."""
    return _transposed(weight)


def user_w2_from_native(native: Tensor) -> Tensor:
    """Inverse of `native_w2_from_user`."""
    return _transposed(native)


def interleave_bias(bias: Tensor) -> Tensor:
    """Split-half bias `[..., 2I]` -> interleaved `[..., 2I]`."""
    return interleave_gate_up(bias.unsqueeze(-1)).squeeze(-1)


def deinterleave_bias(bias: Tensor) -> Tensor:
    """Inverse of `interleave_bias`."""
    return deinterleave_gate_up(bias.unsqueeze(-1)).squeeze(-1)


def stack(tensors: list[Tensor]) -> Tensor:
    """Per-expert tensors -> one `[E, ...]` tensor (a copy)."""
    return torch.stack([tensor.detach() for tensor in tensors])


class StackedMatrices(Sequence[Tensor]):
    """The E matrices of a contiguous stacked weight, split off when asked for: E views take longer
    than a launch, which reads addresses.
    """

    def __init__(self, stacked: Tensor) -> None:
        self._stacked = stacked
        self._first: Tensor | None = None

    def __len__(self) -> int:
        return int(self._stacked.shape[0])

    def __getitem__(self, index: Any) -> Any:
        """A view; the first, which stands for all, is made once."""
        if index != 0:
            return self._stacked[index]
        if self._first is None:
            self._first = self._stacked[0]
        return self._first

    def __iter__(self) -> Iterator[Tensor]:
        """All views, in one operation."""
        return iter(self._stacked.unbind(0))

    def addresses(self) -> range:
        """Of the matrices, without a view of each."""
        start = data_ptr(self._stacked)
        step = max(1, numel(self._stacked) // len(self) * self._stacked.element_size())
        return range(start, start + len(self) * step, step)


def _addresses(matrices: Sequence[Tensor]) -> Iterable[int]:
    return (
        matrices.addresses() if isinstance(matrices, StackedMatrices) else map(data_ptr, matrices)
    )


@dataclass(frozen=True, eq=False)
class WeightSource:
    """The user's weights where they lie: E matrices each, views of one stacked tensor or parameters
    of their own; never copied.

    up `[H, N1]`, down `[I, H]` when `transposed` (ERNIE, Fleet), else up `[N1, H]`, down `[H, I]`;
    each contiguous.
    split_half: the N1 = 2I gate and up rows (columns) are [gate; up] halves, else interleaved pairs
    (or ungated).
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    transposed: bool
    split_half: bool

    def __post_init__(self) -> None:
        """Refuse sources that no engine could read in place."""
        if not len(self.up) == len(self.down) > 0:
            raise ShapeError(
                f"{len(self.up)} up and {len(self.down)} down matrices; needed: one of each per expert"
            )

    @functools.cached_property
    def pointers(self) -> tuple[int, ...]:
        """Addresses of the up matrices, then of the down matrices."""
        return (*_addresses(self.up), *_addresses(self.down))

    @property
    def n1(self) -> int:
        """Rows of a native w1."""
        return int(self.up[0].shape[1 if self.transposed else 0])

    @property
    def hidden_size(self) -> int:
        return int(self.up[0].shape[0 if self.transposed else 1])

    @property
    def intermediate_size(self) -> int:
        return int(self.down[0].shape[0 if self.transposed else 1])


def native_matrices(source: WeightSource) -> tuple[Tensor, Tensor]:
    """Native copies `(w1 [E, N1, H], w2 [E, H, I])` in the weights' dtype."""
    up, down = stack(list(source.up)), stack(list(source.down))
    if source.transposed:
        up, down = up.transpose(-2, -1).contiguous(), down.transpose(-2, -1).contiguous()
    return interleave_gate_up(up) if source.split_half else up, down


def _transposed(matrix: Tensor) -> Tensor:
    """The last two axes swapped, in fresh memory: an axis of one element leaves the swapped view
    contiguous as it is.
    """
    swapped = matrix.transpose(-2, -1)
    return swapped.clone() if swapped.is_contiguous() else swapped.contiguous()
