"""`RoutingMetadata`: which row computes which slot. Built once per forward, read by every stage of
both passes.

Legend: T tokens, K slots per token, E local experts, S = T*K flat slots (slot = token * K + k), R
rows of the padded, expert-sorted layout. An expert's rows are its tokens in ascending order
(stable), padded to `alignment` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from ..errors import RoutingError

Tensor = torch.Tensor

NO_ROW = -1
ROW_ALIGNMENT = 128


@dataclass(frozen=True, eq=False)
class RoutingMetadata:
    """The routing tensors of one forward. Each is fully written, and no stage reads more of it than
    is described here.

    Attributes:
        num_tokens, topk, num_experts: T, K, E.
        alignment: rows every expert is padded to (a multiple of 128).
        num_rows: R, the size of every `row_*` tensor. At least `padded_offsets[E]`; rows beyond it
            are padding too, so a builder that does not know the counts on the host may size R for
            the worst case.
        expert_counts:  int32 `[E]`, true number of rows per expert.
        padded_offsets: int64 `[E+1]`, exclusive prefix sum of the padded counts; expert e owns rows
            `padded_offsets[e] .. padded_offsets[e] + expert_counts[e]`, then its padding.
        row_token: int32 `[R]`, token gathered into each row; -1 in padding rows.
        slot_row:  int64 `[T, K]`, row that computes each slot; -1 where the slot is not routed here.
        row_prob:  fp32 `[R]`, routing probability of each row; exactly 0 in padding rows.
        host_counts: `expert_counts` as Python ints where the builder knows them without waiting for
            a device, else None.
        sizes: the five numbers, which come before the tensors in the constructor.
        held: the tensors that there are without a view: the memory, or all five.
        memory: bytes that hold all five tensors, where one builder has filled them, else None. Then
            each tensor is a view that is made when somebody asks for it.
    """

    num_tokens: int
    topk: int
    num_experts: int
    alignment: int
    num_rows: int
    expert_counts: Tensor
    padded_offsets: Tensor
    row_token: Tensor
    slot_row: Tensor
    row_prob: Tensor
    host_counts: tuple[int, ...] | None = None
    # Not of the constructor: `dataclasses.replace` of one tensor gives metadata of five.
    memory: Tensor | None = field(default=None, init=False, repr=False)
    sizes: tuple[int, ...] = field(init=False, repr=False)
    held: tuple[Tensor, ...] = field(init=False, repr=False)

    TENSOR_FIELDS = ("expert_counts", "padded_offsets", "row_token", "slot_row", "row_prob")

    @classmethod
    def in_memory(
        cls, sizes: tuple[int, ...], memory: Tensor, places: tuple[int, ...]
    ) -> RoutingMetadata:
        """The metadata of numbers as `sizes` has them, and of tensors in one memory. places: the first byte of
        each, in the order of `TENSOR_FIELDS`, then the number of all bytes.
        """
        made = cls.__new__(cls)
        made.__dict__.update(zip(_NUMBERS, sizes, strict=True))
        made.__dict__.update(memory=memory, places=places, host_counts=None)
        made.__dict__.update(sizes=sizes, held=(memory,))
        return made

    def __post_init__(self) -> None:
        self.__dict__.update(sizes=_SIZES(self), held=_TENSORS(self))

    def __getattr__(self, name: str) -> Tensor:
        """A tensor that lies in `memory`."""
        memory = self.__dict__.get("memory")
        if memory is None or name not in self.TENSOR_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        shape, dtype = {
            "expert_counts": ((self.num_experts,), torch.int32),
            "padded_offsets": ((self.num_experts + 1,), torch.int64),
            "row_token": ((self.num_rows,), torch.int32),
            "slot_row": ((self.num_tokens, self.topk), torch.int64),
            "row_prob": ((self.num_rows,), torch.float32),
        }[name]
        # Retyped first and sliced then, because Paddle retypes a slice at a wrong address.
        whole = memory.view(dtype)
        first = self.places[self.TENSOR_FIELDS.index(name)] // whole.element_size()
        made = whole[first : first + math.prod(shape)].reshape(shape)
        self.__dict__[name] = made
        return made

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in `TENSOR_FIELDS` order."""
        return _TENSORS(self)

    def counts_on_host(self) -> tuple[int, ...]:
        """`expert_counts` as Python ints; waits for the device only when the builder did not know
        them.
        """
        if self.host_counts is not None:
            return self.host_counts
        return tuple(int(count) for count in self.expert_counts.tolist())

    def expert_slices(self) -> list[tuple[int, int, int]]:
        """`(first_row, count, padded_count)` of each expert, on the host."""
        # The same arithmetic as `padded_offsets`, on the host, for engines that loop over experts.
        slices, first = [], 0
        for count in self.counts_on_host():
            padded = round_up(count, self.alignment)
            slices.append((first, count, padded))
            first += padded
        return slices


_TENSORS: Callable[[RoutingMetadata], tuple[Tensor, ...]] = attrgetter(
    *RoutingMetadata.TENSOR_FIELDS
)
_NUMBERS = ("num_tokens", "topk", "num_experts", "alignment", "num_rows")
_SIZES: Callable[[RoutingMetadata], tuple[int, ...]] = attrgetter(*_NUMBERS)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def check_alignment(alignment: int) -> None:
    """Raise RoutingError unless `alignment` is a positive multiple of the 128-row GEMM tile."""
    if alignment <= 0 or alignment % ROW_ALIGNMENT:
        raise RoutingError(
            f"alignment is {alignment}; needed: a positive multiple of {ROW_ALIGNMENT}, the rows of a GEMM tile"
        )
