"""`RowExchange` over `paddle.distributed`: one `alltoall_single`, or gathering where the backend has
none (gloo, on CPUs); and one `all_gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ..errors import ConfigError, expect
from .collective import RowExchange


class PaddleExchange(RowExchange):
    """Rows through a communication group; None is the default group. ConfigError where no parallel
    environment was initialised.
    """

    def __init__(self, group: Any = None) -> None:
        words = "paddle.distributed is not initialised; call init_parallel_env or fleet.init first"
        expect(dist.is_initialized(), ConfigError, words)
        self._group = dist.get_group() if group is None else group
        self.world_size, self.rank = int(self._group.nranks), int(self._group.rank)
        backend = str(dist.get_backend(self._group)).lower()
        # Paddle's gloo backend has no all-to-all. Tests and CPU runs take the slow way.
        self._gathers = backend == "gloo"
        self.name = f"paddle.distributed ({backend})"

    def exchange(
        self, rows: Any, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> paddle.Tensor:
        if self._gathers:
            return self._exchange_gathered(rows, send_counts)
        arrived = paddle.empty([sum(recv_counts), int(rows.shape[1])], dtype=rows.dtype)
        dist.alltoall_single(arrived, rows, list(send_counts), list(recv_counts), group=self._group)
        return arrived

    def gather(self, rows: Any) -> paddle.Tensor:
        size = int(rows.shape[0]) // self.world_size
        own = rows[self.rank * size : (self.rank + 1) * size]
        dist.stream.all_gather(rows, own, group=self._group)
        return rows

    def _exchange_gathered(self, rows: Any, send_counts: Sequence[int]) -> paddle.Tensor:
        """Send the rows of every rank to every rank; each keeps its own.

        Point-to-point messages would send less. But Paddle's gloo numbers messages by each rank's
        own count of calls, so with more than two ranks, partners wait for different numbers and
        hang.
        """
        # Entry (source, destination) says how many rows travel. All ranks need the whole table,
        # because every rank has to find its part in each of the others' rows.
        counts = np.stack(self._gather(np.asarray(send_counts, dtype=np.int64)))
        # `all_gather` takes equal shapes from all ranks, so everybody pads to the fullest rank.
        size, width = int(counts.sum(1).max()), int(rows.shape[1])
        if size == 0:
            return rows
        padded = np.zeros([size, width], dtype=np.uint8)
        padded[: int(rows.shape[0])] = rows.numpy() if int(rows.shape[0]) else 0
        # Where the rows for each destination begin within a source's rows.
        starts = (np.cumsum(counts, axis=1) - counts)[:, self.rank]
        mine = zip(self._gather(padded), starts, counts[:, self.rank], strict=True)
        return paddle.to_tensor(
            np.concatenate([rows[first : first + n] for rows, first, n in mine])
        )

    def _gather(self, values: np.ndarray) -> list[np.ndarray]:
        gathered: list[Any] = []
        dist.all_gather(gathered, paddle.to_tensor(values), group=self._group)
        return [each.numpy() for each in gathered]


def is_gpu_group(group: Any) -> bool:
    """Whether the group's ranks exchange GPU tensors."""
    return "nccl" in str(dist.get_backend(group)).lower()
