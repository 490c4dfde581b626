"""`RowExchange` over `torch.distributed`: NCCL and gloo, one `all_to_all_single` or one
`all_gather_single`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, expect
from .collective import RowExchange

Tensor = torch.Tensor
# The answer of `get_backend` for a group that was made without naming a backend, and its
# sub-groups.
UNDEFINED = "undefined"
_LARGE = 1 << 20  # bytes, from which on a copy of their own is worth its launch
# Its name before PyTorch 2.13, which warns of the old one.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchExchange(RowExchange):
    """Rows through a process group; None is the default group. ConfigError where no process group
    was initialised.
    """

    def __init__(self, group: Any = None) -> None:
        words = "torch.distributed has no process group; call init_process_group first"
        expect(dist.is_initialized(), ConfigError, words)
        self._group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        backend = str(dist.get_backend(group))
        known = backend if backend != UNDEFINED else dist.get_backend_config(group)
        self.name = f"torch.distributed ({known})"

    def exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        arrived = torch.empty(
            [sum(recv_counts), int(rows.shape[1])], dtype=rows.dtype, device=rows.device
        )
        own = send_counts[self.rank] * int(rows.shape[1])
        if rows.is_cuda and self.world_size > 1 and own >= _LARGE:
            arriving, leaving = arrived.split(list(recv_counts)), rows.split(list(send_counts))
            self._exchange_with_others(list(arriving), list(leaving))
            return arrived
        # PyTorch takes output sizes before input sizes, Paddle the other way round.
        dist.all_to_all_single(
            arrived, rows, list(recv_counts), list(send_counts), group=self._group
        )
        return arrived

    def gather(self, rows: Tensor) -> Tensor:
        own = rows.chunk(self.world_size)[self.rank]
        _gather_single(rows, own, group=self._group)
        return rows

    def _exchange_with_others(self, arriving: list[Tensor], leaving: list[Tensor]) -> None:
        """NCCL would copy the rows that stay here by the thread blocks that serve the other ranks,
        as slowly as it serves them.
        """
        arriving[self.rank].copy_(leaving[self.rank])
        for pieces in (arriving, leaving):
            pieces[self.rank] = pieces[self.rank][:0]
        dist.all_to_all(arriving, leaving, group=self._group)


def is_gpu_group(group: Any) -> bool:
    """Whether the group's ranks exchange GPU tensors by NCCL, also where nobody named the backend
    ("cuda:nccl" of a configuration).
    """
    return "nccl" in dist.get_backend_config(group).lower()
