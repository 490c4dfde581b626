"""`Parallel` over `torch.distributed`: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .parallel import JoinedRanks, RankLayout

Tensor = torch.Tensor
JOIN_TIMEOUT = timedelta(minutes=10)


class TorchParallel(JoinedRanks):
    """Joins the launcher's ranks and makes the groups."""

    def __init__(self, layout: RankLayout, max_tokens: int) -> None:
        super().__init__(layout, max_tokens)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", layout.launch.local_rank)
            # Before the process group: NCCL takes the current device, and all ranks of a host would
            # share GPU 0.
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo", timeout=JOIN_TIMEOUT
        )
        self._world_group = dist.group.WORLD
        self._ep_group = self._join(layout.ep_groups)
        self._replica_group = self._join(layout.replica_groups)

    def gather_ep(self, values: np.ndarray) -> list[np.ndarray]:
        own = torch.from_numpy(values).to(self.device)
        pieces = [torch.empty_like(own) for _ in range(self.layout.ep_size)]
        dist.all_gather(pieces, own, group=self._ep_group)
        return [piece.cpu().numpy() for piece in pieces]

    def largest(self, value: int) -> int:
        number = torch.tensor(value, device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)

    def close(self) -> None:
        dist.destroy_process_group()

    def _join(self, groups: list[list[int]]) -> Any:
        """Own group among `groups`; every rank makes all of them, in one order."""
        # `new_group` is a collective of all ranks, those outside the group included.
        made = [dist.new_group(ranks) for ranks in groups]
        return next(
            group for group, ranks in zip(made, groups, strict=True) if self.layout.rank in ranks
        )

    def _sum(self, tensors: list[Tensor], group: Any) -> None:
        if not tensors or dist.get_world_size(group) == 1:
            return
        # One message for all tensors, and one order of additions.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.reshape(tensor.shape))
