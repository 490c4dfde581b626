"""Triton counterpart of `cuda/routing_metadata.cu`: identical tensors, three launches instead of
one.

Slots are cut into one contiguous chunk per program: count per expert, prefix over programs, then
rank and write. Integer arithmetic only, so the results do not depend on how a program is scheduled.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..jit.triton_kernel import stored_jit

Tensor = torch.Tensor

_MAX_PROGRAMS = 1024
_MIN_SLOTS_PER_PROGRAM = 256
_ONE_HOT_ELEMENTS = 8192
_FILL = 128
_GATHER = 1024


@triton.jit
def _expert_of(indices, slot, end, num_experts):
    # Both spellings of "not here", -1 and ids from E on, become -1, which equals no expert number
    # and so drops out of every comparison below.
    ids = tl.load(indices + slot, mask=slot < end, other=-1).to(tl.int64)
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@stored_jit(do_not_specialize=["num_slots", "slots_per_program"])
def _count(
    indices,
    program_counts,
    num_slots,
    slots_per_program,
    num_experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    begin = program * slots_per_program
    end = tl.minimum(begin + slots_per_program, num_slots)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(begin, end, BLOCK):
        expert = _expert_of(indices, first + tl.arange(0, BLOCK), end, num_experts)
        # A one-hot comparison `[BLOCK, EXPERTS]`, summed over slots. Every program counts its own
        # chunk into its own row, so no atomics are needed and the result is the same in every run.
        counts += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(program_counts + program * num_experts + experts, counts, mask=experts < num_experts)


@stored_jit(do_not_specialize=["num_programs"])
def _scan_programs(program_counts, expert_counts, num_programs, num_experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for first in range(0, num_programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        address = program_counts + program.to(tl.int64) * num_experts + expert
        counts = tl.load(address, mask=program < num_programs, other=0)
        # The counts become exclusive prefix sums in place: afterwards entry (program, expert) says
        # how many slots of that expert lie in earlier chunks. That is the rank of the first slot of
        # this chunk.
        tl.store(address, tl.cumsum(counts, 0) - counts + total, mask=program < num_programs)
        total += tl.sum(counts, 0)
    tl.store(expert_counts + expert, total)


@triton.jit
def _fill_padding(row_token, row_prob, row, end):
    tl.store(row_token + row, tl.full(row.shape, -1, tl.int32), mask=row < end)
    tl.store(row_prob + row, tl.full(row.shape, 0.0, tl.float32), mask=row < end)


@stored_jit(do_not_specialize=["num_slots", "num_rows", "slots_per_program"])
def _write(
    indices, probs, program_counts, expert_counts, padded_offsets, row_token, slot_row, row_prob,
    num_slots, num_rows, slots_per_program, topk, num_experts, alignment,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    counts = tl.load(expert_counts + experts, mask=known, other=0).to(tl.int64)
    # Every program computes the same offsets of all experts again, which costs less than another
    # launch. Program 0 writes them down.
    padded = (counts + alignment - 1) // alignment * alignment
    padded_first = tl.cumsum(padded, 0) - padded
    padded_total = tl.sum(padded, 0)
    if program == 0:
        tl.store(padded_offsets + experts, padded_first, mask=known)
        tl.store(padded_offsets + num_experts, padded_total)

    next_row = padded_first + tl.load(
        program_counts + program * num_experts + experts, mask=known, other=0
    )
    begin = program * slots_per_program
    end = tl.minimum(begin + slots_per_program, num_slots)
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        expert = _expert_of(indices, slot, end, num_experts)
        hit = expert[:, None] == experts[None, :]
        # Rank among the slots of the same expert inside this block. Slots are ascending, so rows of
        # an expert lie in token order.
        rank = tl.cumsum(hit.to(tl.int32), 0) - 1
        row = tl.sum(tl.where(hit, next_row[None, :] + rank, 0), 1)
        # The next block of the chunk continues where this one ended.
        next_row += tl.sum(hit.to(tl.int64), 0)
        # A row beyond the buffers means the caller's counts were too small: drop the slot, never
        # write out of bounds.
        placed = (expert >= 0) & (row < num_rows)
        tl.store(slot_row + slot, tl.where(placed, row, -1), mask=slot < end)
        tl.store(row_token + row, (slot // topk).to(tl.int32), mask=placed)
        tl.store(row_prob + row, tl.load(probs + slot, mask=placed, other=0.0), mask=placed)

    # Padding rows of the experts, dealt out over the programs. `counts` to `padded` is the gap
    # behind an expert's real rows.
    for padded_expert in range(program, num_experts, programs):
        mine = experts == padded_expert
        first_row = tl.sum(tl.where(mine, padded_first + counts, 0), 0)
        last_row = tl.minimum(tl.sum(tl.where(mine, padded_first + padded, 0), 0), num_rows)
        for start in range(first_row, last_row, FILL):
            _fill_padding(row_token, row_prob, start + tl.arange(0, FILL), last_row)
    # Rows behind the last expert exist where the buffers are larger than needed, as for a
    # worst-case size. They are marked as padding, too.
    for start in range(padded_total + program * FILL, num_rows, programs * FILL):
        _fill_padding(row_token, row_prob, start + tl.arange(0, FILL), num_rows)


@stored_jit(do_not_specialize=["num_tokens", "num_rows"])
def _place_sorted_rows(
    counts, probs, expert_counts, padded_offsets, row_token, slot_row, row_prob,
    num_tokens, num_rows, num_experts, alignment,
    WITH_PROBS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    # Every program scans the counts for itself, which costs less than another launch.
    given = tl.load(counts + experts, mask=known, other=0).to(tl.int64)
    given = tl.maximum(given, 0)
    # Counts of more rows than there are: the experts share the rows that there are.
    end_token = tl.minimum(tl.cumsum(given, 0), num_tokens)
    first_token = tl.minimum(tl.cumsum(given, 0) - given, num_tokens)
    own = end_token - first_token
    padded = (own + alignment - 1) // alignment * alignment
    first_row = tl.cumsum(padded, 0) - padded
    if program == 0:
        tl.store(expert_counts + experts, own.to(tl.int32), mask=known)
        tl.store(padded_offsets + experts, first_row, mask=known)
        tl.store(padded_offsets + num_experts, tl.sum(padded, 0))

    # One item is a row and a slot. A comparison with every expert finds its own: at most one holds
    # it.
    item = program * BLOCK + tl.arange(0, BLOCK)
    rank = item[:, None] - first_row[None, :]
    mine = (rank >= 0) & (rank < own[None, :])
    token = tl.sum(tl.where(mine, first_token[None, :] + rank + 1, 0), 1) - 1
    placed = token >= 0
    prob = tl.where(placed, 1.0, 0.0)
    if WITH_PROBS:
        prob = tl.load(probs + token, mask=placed & (item < num_rows), other=0.0)
    tl.store(row_token + item, token.to(tl.int32), mask=item < num_rows)
    tl.store(row_prob + item, prob, mask=item < num_rows)
    rank = item[:, None] - first_token[None, :]
    mine = (rank >= 0) & (rank < own[None, :])
    row = tl.sum(tl.where(mine, first_row[None, :] + rank + 1, 0), 1) - 1
    # A row beyond the buffers means that the counts on the host were too small.
    tl.store(slot_row + item, tl.where(row < num_rows, row, -1), mask=item < num_tokens)


@stored_jit(do_not_specialize=["size", "limit"])
def _gather_or_zero(index, values, out, size, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Elements beyond `size` load -1, which no value has as its place, so they are not found and
    # nothing is read for them.
    source = tl.load(index + at, mask=at < size, other=-1)
    found = (source >= 0) & (source < limit)
    tl.store(out + at, tl.load(values + source, mask=found, other=0.0), mask=at < size)


def build_metadata(
    indices: Tensor, probs: Tensor, outputs: tuple[Tensor, ...], num_experts: int, alignment: int
) -> None:
    """Fill `outputs` (in the order of `RoutingMetadata.TENSOR_FIELDS`) from contiguous `[T, K]`
    indices and fp32 probs.

    Launches on the stream that Triton takes from the framework; waits for nothing.
    """
    expert_counts, padded_offsets, row_token, slot_row, row_prob = outputs
    num_slots, topk = int(indices.shape[0]) * int(indices.shape[1]), max(int(indices.shape[1]), 1)
    experts = max(triton.next_power_of_2(num_experts), 2)
    # The one-hot matrix of a block must fit into registers, so more experts mean shorter blocks.
    block = min(256, max(16, _ONE_HOT_ELEMENTS // experts))
    # At least 256 slots per program, and more of them once that would take more than 1024 programs,
    # because the scan over programs is serial.
    per_program = _MIN_SLOTS_PER_PROGRAM * max(
        1, triton.cdiv(num_slots, _MIN_SLOTS_PER_PROGRAM * _MAX_PROGRAMS)
    )
    programs = max(1, triton.cdiv(num_slots, per_program))
    program_counts = torch.empty((programs, num_experts), dtype=torch.int32, device=indices.device)
    _count[(programs,)](
        indices, program_counts, num_slots, per_program, num_experts, BLOCK=block, EXPERTS=experts
    )
    _scan_programs[(num_experts,)](program_counts, expert_counts, programs, num_experts, BLOCK=256)
    _write[(programs,)](
        indices, probs, program_counts, expert_counts, padded_offsets, row_token, slot_row, row_prob,
        num_slots, int(row_token.shape[0]), per_program, topk, num_experts, alignment,
        BLOCK=block, EXPERTS=experts, FILL=_FILL,
    )  # fmt: skip


def build_sorted(
    counts: Tensor, probs: Tensor | None, outputs: tuple[Tensor, ...], alignment: int
) -> None:
    """Fill `outputs` of K = 1 from contiguous counts `[E]` of rows in expert order and fp32 probs
    `[T]`, None for 1. One launch.
    """
    row_token, slot_row = outputs[2], outputs[3]
    num_tokens, num_rows = int(slot_row.shape[0]), int(row_token.shape[0])
    num_experts = int(counts.shape[0])
    experts = max(triton.next_power_of_2(num_experts), 2)
    block = min(256, max(16, _ONE_HOT_ELEMENTS // experts))
    programs = max(1, triton.cdiv(max(num_tokens, num_rows), block))
    # The kernel reads no probability without `WITH_PROBS`, and a launch needs an address.
    given = outputs[4] if probs is None else probs
    _place_sorted_rows[(programs,)](
        counts, given, *outputs, num_tokens, num_rows, num_experts, alignment,
        WITH_PROBS=probs is not None, BLOCK=block, EXPERTS=experts,
    )  # fmt: skip


def gather_or_zero(index: Tensor, values: Tensor, out: Tensor) -> None:
    """`out[i] = values[index[i]]`, or 0 where `index[i]` is none of `values`; index int64, values
    and out fp32, contiguous.
    """
    size = 1
    for extent in index.shape:
        size *= int(extent)
    if size:
        _gather_or_zero[(triton.cdiv(size, _GATHER),)](
            index, values, out, size, int(values.shape[0]), BLOCK=_GATHER
        )
