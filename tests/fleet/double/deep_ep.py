"""DeepEP's `Buffer` as far as Fleet calls it, within one process.

The rank keeps the rows of its own tokens, once per token, and ids that are nobody's arrive as -1
with weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import paddle


class Handle(NamedTuple):
    """The token of each row, and how many tokens there are."""

    sources: np.ndarray
    num_tokens: int


class Buffer:
    """`group` has one rank."""

    num_sms = 20

    def __init__(self, group):
        assert group.nranks == 1

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
        """Rows `[N, H]` back to their sources, without weights."""
        return self._back(x, handle), (
            None if topk_weights is None else self._back(topk_weights, handle)
        )

    def _routes(self, topk_idx, topk_weights, num_experts):
        assert topk_weights.dtype == paddle.float32 and topk_idx.dtype == paddle.int64
        ids, weights = topk_idx.numpy(), topk_weights.numpy()
        valid = (ids >= 0) & (ids < num_experts)
        sources = np.flatnonzero(valid.any(1))
        ids, weights, valid = ids[sources], weights[sources], valid[sources]
        return (
            Handle(sources, len(topk_idx)),
            paddle.to_tensor(np.where(valid, ids, -1)),
            paddle.to_tensor(np.where(valid, weights, np.float32(0))),
            [int((ids == expert).sum()) for expert in range(num_experts)],
        )

    def _move(self, rows, handle):
        return from_bytes(as_bytes(rows)[handle.sources], int(rows.shape[1]), rows.dtype)

    def _back(self, rows, handle):
        width = int(rows.shape[1])
        total = np.zeros((handle.num_tokens, width), np.float32)
        total[handle.sources] = rows.astype("float32").numpy().reshape(-1, width)
        return paddle.to_tensor(total).astype(rows.dtype)


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
