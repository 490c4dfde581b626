"""DeepEP's `Buffer` as far as Fleet calls it, over gloo or within one process.

Every rank gathers what every other sends and keeps its own rows: in the order of source ranks, then
of source tokens, once per (token, rank). Ids arrive as local ones, -1 elsewhere, with weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import paddle


class Handle(NamedTuple):
    """Who sent my rows: (source rank, source token) `[N, 2]`; and the tokens of every rank."""

    sources: np.ndarray
    num_tokens: int


class Buffer:
    """`group` has `nranks`, `rank` and, beyond one rank, is a group of paddle.distributed."""

    num_sms = 20

    def __init__(self, group):
        self.group = group
        self.sent_bytes = 0

    def dispatch(self, x, topk_idx=None, topk_weights=None, num_experts=None, handle=None):
        """`(recv_x, recv_idx, recv_weights, counts, handle)`; along `handle` only the rows."""
        rows = x if isinstance(x, tuple) else (x,)
        for part in rows:
            assert part.is_contiguous() and part.shape[0] == rows[0].shape[0]
        if isinstance(x, tuple):
            assert x[0].dtype == paddle.float8_e4m3fn and x[1].dtype in (
                paddle.int32,
                paddle.float32,
            ), "a pair is e4m3 codes and scales of 32 bits"
        idx = weights = counts = None
        if handle is None:
            handle, idx, weights, counts = self._routes(topk_idx, topk_weights, num_experts)
        arrived = tuple(self._move(part, handle) for part in rows)
        return arrived if isinstance(x, tuple) else arrived[0], idx, weights, counts, handle

    def combine(self, x, handle, topk_weights=None):
        """Rows `[N, H]` back to their sources, summed over ranks without weights."""
        return self._back(x, handle), (
            None if topk_weights is None else self._back(topk_weights, handle)
        )

    def _routes(self, topk_idx, topk_weights, num_experts):
        assert topk_weights.dtype == paddle.float32 and topk_idx.dtype == paddle.int64
        local = num_experts // self.group.nranks
        first = self.group.rank * local
        ids = self._gather(topk_idx.numpy())
        weights = self._gather(topk_weights.numpy())
        found = [
            (rank, token, slots - first, probs)
            for rank, (of_rank, its_weights) in enumerate(zip(ids, weights, strict=True))
            for token, (slots, probs) in enumerate(zip(of_rank, its_weights, strict=True))
            if ((slots >= first) & (slots < first + local)).any()
        ]
        topk = int(topk_idx.shape[1])
        sources = np.array([each[:2] for each in found], dtype=np.int64).reshape(-1, 2)
        here = np.array([each[2] for each in found], dtype=np.int64).reshape(-1, topk)
        probs = np.array([each[3] for each in found], dtype=np.float32).reshape(-1, topk)
        mine = (here >= 0) & (here < local)
        counts = [int((here == expert).sum()) for expert in range(local)]
        handle = Handle(sources, int(topk_idx.shape[0]))
        return (
            handle,
            paddle.to_tensor(np.where(mine, here, -1)),
            paddle.to_tensor(np.where(mine, probs, np.float32(0))),
            counts,
        )

    def _move(self, rows, handle):
        self.sent_bytes += int(np.prod(rows.shape)) * rows.element_size()
        everywhere = self._gather(as_bytes(rows))
        width = int(rows.shape[1])
        taken = [everywhere[rank][token] for rank, token in handle.sources]
        held = np.stack(taken) if taken else np.zeros((0, width * rows.element_size()), np.uint8)
        return from_bytes(held, width, rows.dtype)

    def _back(self, rows, handle):
        width = int(rows.shape[1])
        values = self._gather(rows.astype("float32").numpy().reshape(-1, width))
        sources = self._gather(handle.sources)
        total = np.zeros((handle.num_tokens, width), np.float32)
        for of_rank, where in zip(values, sources, strict=True):
            mine = where[:, 0] == self.group.rank
            np.add.at(total, where[mine, 1], of_rank[mine])
        return paddle.to_tensor(total).astype(rows.dtype)

    def _gather(self, array):
        """The array of every rank; first sizes may differ."""
        if self.group.nranks == 1:
            return [array]
        size = len(array)
        sizes = gather(np.array([size]), self.group)
        padded = np.zeros((max(int(n[0]) for n in sizes), *array.shape[1:]), array.dtype)
        padded[:size] = array
        found = gather(padded, self.group)
        return [each[: int(n[0])] for each, n in zip(found, sizes, strict=True)]


def gather(array, group):
    """One array of one shape from every rank, by gloo."""
    if 0 in array.shape:
        return [array] * group.nranks
    gathered = []
    paddle.distributed.all_gather(gathered, paddle.to_tensor(array), group=group)
    return [each.numpy() for each in gathered]


def as_bytes(rows):
    """uint8 `[T, B]` numpy of a tensor's rows."""
    if 0 in tuple(rows.shape):
        return np.zeros((int(rows.shape[0]), int(rows.shape[1]) * rows.element_size()), np.uint8)
    return rows.view(paddle.uint8).numpy()


def from_bytes(held, width, dtype):
    """The tensor `[T, width]` of those bytes."""
    if len(held) == 0:
        return paddle.zeros([0, width], dtype="uint8").astype(dtype)
    return paddle.to_tensor(held).view(dtype)
