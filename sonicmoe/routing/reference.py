"""Routing metadata by plain tensor operations, on any device and under both frameworks. The GPU
kernels match it bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from .ids import group_of, ids_of_sorted
from .metadata import NO_ROW, RoutingMetadata, round_up

Tensor = torch.Tensor


def exact_routing(
    indices: Tensor, probs: Tensor, num_experts: int, alignment: int
) -> RoutingMetadata:
    """The metadata with exactly the rows that the indices need; waits for the device."""
    num_tokens, topk = (int(size) for size in indices.shape)
    device = indices.device
    # An example: 3 tokens, K = 2, E = 2, padded to 4 rows, and x for "not here":
    #
    #     indices    [[1, x], [0, 1], [0, x]]       group         1 2 0 1 0 2
    #     sorted by group                           sorted_slots  2 4 | 0 3 | 1 5 (cut off)
    #     rank within the expert                                  0 1 | 0 1
    #     row = padded_offsets[expert] + rank                     0 1 | 4 5
    #
    # A slot is token * K + k.
    ids = indices.reshape([num_tokens * topk]).to(torch.int64)
    # A stable sort of slots is a stable sort of tokens.
    group = group_of(ids, num_experts)
    counts = torch.bincount(group, minlength=num_experts + 1)[:num_experts]
    # Sizes of the row tensors depend on these numbers, so this function waits for the device.
    host_counts = tuple(int(count) for count in counts.tolist())
    padded = tuple(round_up(count, alignment) for count in host_counts)
    num_rows, num_valid = sum(padded), sum(host_counts)

    # The extra group sorts last, so that the first `num_valid` entries are the slots with an
    # expert.
    sorted_slots = torch.argsort(group, stable=True)[:num_valid]
    expert_of = group[sorted_slots]
    offsets, padded_offsets = _offsets(host_counts, device), _offsets(padded, device)
    # The position in the sorted order, counted from the expert's first slot.
    rank = torch.arange(num_valid, dtype=torch.int64, device=device) - offsets[expert_of]
    rows = padded_offsets[expert_of] + rank

    # Everything starts as padding, and the scatter below overwrites true rows only.
    slot_row = _filled(num_tokens * topk, NO_ROW, torch.int64, device)
    row_token = _filled(num_rows, NO_ROW, torch.int32, device)
    row_prob = _filled(num_rows, 0.0, torch.float32, device)
    if num_valid:
        slot_row[sorted_slots] = rows
        row_token[rows] = (sorted_slots // topk).to(torch.int32)
        row_prob[rows] = probs.reshape([num_tokens * topk])[sorted_slots]
    return RoutingMetadata(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=num_experts,
        alignment=alignment,
        num_rows=num_rows,
        expert_counts=torch.tensor(host_counts, dtype=torch.int32, device=device),
        padded_offsets=padded_offsets,
        row_token=row_token,
        slot_row=slot_row.reshape([num_tokens, topk]),
        row_prob=row_prob,
        host_counts=host_counts,
    )


def exact_sorted_routing(
    counts: Tensor, probs: Tensor | None, num_tokens: int, alignment: int
) -> RoutingMetadata:
    """The routing of `num_tokens` rows in expert order, one slot each; probs None: 1."""
    ids = ids_of_sorted(counts, num_tokens)
    if probs is None:
        probs = torch.ones([num_tokens], dtype=torch.float32, device=counts.device)
    return exact_routing(ids, probs.reshape([num_tokens, 1]), int(counts.shape[0]), alignment)


def _offsets(counts: tuple[int, ...], device: Any) -> Tensor:
    running = [0]
    for count in counts:
        running.append(running[-1] + count)
    return torch.tensor(running, dtype=torch.int64, device=device)


def _filled(size: int, value: float, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.full((size,), value, dtype=dtype, device=device)
