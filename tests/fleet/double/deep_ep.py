"""DeepEP's `Buffer` as far as Fleet calls it, on one rank: every token stays where it is."""

from __future__ import annotations

import paddle


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
        arrived = tuple(map(self._move, rows))
        arrived = arrived if isinstance(x, tuple) else arrived[0]
        if handle is not None:
            return arrived, None, None, None, handle
        assert topk_weights.dtype == paddle.float32 and topk_idx.dtype == paddle.int64
        ids = topk_idx.numpy()
        assert ((ids >= 0) & (ids < num_experts)).all()
        counts = [int((ids == expert).sum()) for expert in range(num_experts)]
        return arrived, topk_idx.clone(), topk_weights.clone(), counts, object()

    def combine(self, x, handle, topk_weights=None):
        """Rows `[N, H]` back to their sources, without weights."""
        return x.clone(), None if topk_weights is None else topk_weights.clone()

    def _move(self, rows):
        return rows.clone()
