"""Reference builder of `RoutingMetadata`: plain tensor operations, any device, both frameworks. The
GPU kernels match it bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interop import plain_ops
from .metadata import NO_ROW, ROW_ALIGNMENT, RoutingMetadata, check_alignment, round_up
from .validation import check_contents, check_counts, check_indices_and_probs, host_counts_of

Tensor = torch.Tensor


def build_routing(
    indices: Tensor,
    probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool = False,
) -> RoutingMetadata:
    """Build the metadata of one forward from dispatched top-k indices and probabilities.

    Args:
        indices: int32 or int64 `[T, K]`; an entry is valid iff `0 <= id < num_experts`. -1 and ids
            >= num_experts, in any position, both mean "not here".
        probs: fp32 `[T, K]`; read at valid slots only.
        num_experts: E, local experts.
        tokens_per_expert: E counts (list or host tensor), true or rounded up to one power of two;
            None or an empty list: count.
        alignment: rows every expert is padded to.
        validate: also check distinct ids, finite probabilities and ids >= -1.

    Raises:
        RoutingError: counts disagree with the indices, or `validate` found a violation.
        ShapeError, DTypeError, DeviceError: the inputs do not fit together.
    """
    check_alignment(alignment)
    check_indices_and_probs(indices, probs, num_experts)
    given = host_counts_of(tokens_per_expert, num_experts)
    with plain_ops():
        if validate:
            check_contents(indices, probs, num_experts)
        return _build(indices.detach(), probs.detach(), num_experts, given, alignment)


def _build(
    indices: Tensor, probs: Tensor, num_experts: int, given: tuple[int, ...] | None, alignment: int
) -> RoutingMetadata:
    num_tokens, topk = (int(size) for size in indices.shape)
    device = indices.device
    ids = indices.reshape([num_tokens * topk]).to(torch.int64)
    valid = (ids >= 0) & (ids < num_experts)
    # Invalid slots form one more group that sorts last; a stable sort of slots is a stable sort of
    # tokens.
    group = torch.where(valid, ids, torch.full_like(ids, num_experts))
    counts = torch.bincount(group, minlength=num_experts + 1)[:num_experts]
    host_counts = tuple(int(count) for count in counts.tolist())
    if given is not None:
        check_counts(given, host_counts)
    padded = tuple(round_up(count, alignment) for count in host_counts)
    num_rows, num_valid = sum(padded), sum(host_counts)

    sorted_slots = torch.argsort(group, stable=True)[:num_valid]
    expert_of = group[sorted_slots]
    offsets, padded_offsets = _offsets(host_counts, device), _offsets(padded, device)
    rank = torch.arange(num_valid, dtype=torch.int64, device=device) - offsets[expert_of]
    rows = padded_offsets[expert_of] + rank

    slot_row = _filled(num_tokens * topk, NO_ROW, torch.int64, device)
    row_slot = _filled(num_rows, NO_ROW, torch.int64, device)
    row_token = _filled(num_rows, NO_ROW, torch.int32, device)
    row_prob = _filled(num_rows, 0.0, torch.float32, device)
    if num_valid:
        slot_row[sorted_slots] = rows
        row_slot[rows] = sorted_slots
        row_token[rows] = (sorted_slots // topk).to(torch.int32)
        row_prob[rows] = probs.reshape([num_tokens * topk])[sorted_slots]
    return RoutingMetadata(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=num_experts,
        alignment=alignment,
        num_rows=num_rows,
        expert_counts=torch.tensor(host_counts, dtype=torch.int32, device=device),
        expert_offsets=offsets,
        padded_counts=torch.tensor(padded, dtype=torch.int32, device=device),
        padded_offsets=padded_offsets,
        row_token=row_token,
        row_slot=row_slot,
        slot_row=slot_row.reshape([num_tokens, topk]),
        row_prob=row_prob,
        host_counts=host_counts,
    )


def _offsets(counts: tuple[int, ...], device: Any) -> Tensor:
    running = [0]
    for count in counts:
        running.append(running[-1] + count)
    return torch.tensor(running, dtype=torch.int64, device=device)


def _filled(size: int, value: float, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.full((size,), value, dtype=dtype, device=device)
