"""`Parallel` over `paddle.distributed`: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import numpy as np
import paddle
import paddle.distributed as dist

from .parallel import JoinedRanks, RankLayout

Tensor: TypeAlias = paddle.Tensor


class PaddleParallel(JoinedRanks):
    """Joins the launcher's ranks and makes the groups."""

    def __init__(self, layout: RankLayout, max_tokens: int) -> None:
        super().__init__(layout, max_tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_parallel_env()
        self._world_group = dist.get_group()
        self._ep_group = self._join(layout.ep_groups)
        self._replica_group = self._join(layout.replica_groups)

    def gather_ep(self, values: np.ndarray) -> list[np.ndarray]:
        pieces: list[Tensor] = []
        dist.all_gather(pieces, paddle.to_tensor(values), group=self._ep_group)
        return [piece.numpy() for piece in pieces]

    def largest(self, value: int) -> int:
        # As fp32, hence the bound of 2^24 in `Parallel.largest`.
        number = paddle.to_tensor([float(value)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number.item())

    def close(self) -> None:
        dist.destroy_process_group()

    def _join(self, groups: list[list[int]]) -> Any:
        """Own group among `groups`; every rank makes all of them, in one order. None is a group of
        one.
        """
        own = None
        for ranks in groups:
            # The group of all ranks exists already.
            if len(ranks) == self.layout.world_size:
                return dist.get_group()
            dist.barrier()  # Paddle's gloo mixes up groups that are made at the same time
            made = dist.new_group(ranks) if len(ranks) > 1 else None
            dist.barrier()
            own = made if self.layout.rank in ranks else own
        return own

    @paddle.no_grad()
    def _sum(self, tensors: list[Tensor], group: Any) -> None:
        if not tensors or group is None or group.nranks == 1:
            return
        # One message for all tensors: the latency of a collective is paid once and not per tensor.
        flat = paddle.concat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        start = 0
        for tensor in tensors:
            size = int(np.prod(tensor.shape))
            paddle.assign(flat[start : start + size].reshape(tensor.shape), output=tensor)
            start += size
