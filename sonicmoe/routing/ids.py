"""The contract of expert ids in code: docs/design.md, "Routing contract", says it in words.

The kernels code it once per language (`load_experts` in cuda/routing_metadata.cu, `_expert_of` in
triton_routing.py); everything written in Python asks here.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
NOT_HERE = -1


def is_here(ids: Any, num_experts: int) -> Any:
    """Whether each id names one of `num_experts` experts; a tensor or an array of booleans."""
    return (ids >= 0) & (ids < num_experts)


def group_of(ids: Tensor, num_experts: int) -> Tensor:
    """The ids with `num_experts` in place of every id that is not here: one more group, which sorts
    and counts last.
    """
    return torch.where(is_here(ids, num_experts), ids, torch.full_like(ids, num_experts))


def in_one_spelling(ids: Tensor, num_experts: int) -> Tensor:
    """The ids with -1 in place of every id that is not here, for callees that know -1 only."""
    return torch.where(is_here(ids, num_experts), ids, torch.full_like(ids, NOT_HERE))


def count_experts(ids: Tensor, num_experts: int) -> Tensor:
    """int64 `[num_experts]`: slots per expert. On a GPU it waits for the device."""
    if 0 in tuple(ids.shape):
        return torch.zeros([num_experts], dtype=torch.int64, device=ids.device)
    group = group_of(ids.reshape([-1]), num_experts)
    return torch.bincount(group, minlength=num_experts + 1)[:num_experts]


def ids_of_sorted(counts: Tensor, num_rows: int) -> Tensor:
    """int64 `[num_rows, 1]`: the expert of each row, of rows in expert order; the number of experts,
    which is "not here", for those beyond the sum of the counts. A negative count is 0.
    """
    ends = torch.cumsum(torch.clip(counts.to(torch.int64), min=0), 0)
    rows = torch.arange(num_rows, dtype=torch.int64, device=counts.device)
    # The first expert that ends behind the row: experts without rows are passed over.
    return torch.searchsorted(ends, rows, right=True).reshape([num_rows, 1])
