"""Dispatch over symmetric memory: the ranks of one host read each other's rows over NVLink.

A rank writes its tokens into its own memory, and each receiver takes from there what its experts
need, straight to where it belongs (`kernels/cuda/peer_rows.cu`). No row is copied once more, and a
delivery owns its tensors. On the way back each source sums the rows of its tokens, which it reads
from every rank, in rank order and fp32. Rows stand in the order of `CollectiveTransport` and are
summed as it sums them, so the bits are the same.

Barriers run on the device. A dispatch that waits for its counts reads them in memory of the host
that the kernel writes; one that does not has room for `max_tokens` of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import RoutingError, expect
from ..interop import device_name, device_of, empty, is_cuda
from ..kernels import peer_rows_source
from ..quant.format import BlockScaledTensor
from ..routing.backends import arch_of
from ..routing.metadata import ROW_ALIGNMENT
from .collective import reinterpret
from .fixed_size import RowLimit
from .interface import Meanwhile, Received, Tokens, Transport, nothing
from .peer_memory import MOST_EXPERTS, PeerMemory

Tensor = torch.Tensor
_NO_LIMIT = 2**31  # slots: the kernel does not count them then


@dataclass(frozen=True, eq=False)
class PeerRoutes:
    """The routes of one dispatch, both ways.

    sources int32 `[R]`: source rank * most_tokens + token of each row, -1 where there is no row.
    places int32 `[T, W]`: the row of each token on each rank, -1 where none is. topk_idx int64
    `[T, K]`, as sent. most_tokens, most_rows: of any rank, the same on all.
    """

    topk_idx: Tensor
    sources: Tensor
    places: Tensor
    most_tokens: int
    most_rows: int


class SymmetricTransport(Transport):
    """`Transport` over the memory of the ranks of one host.

    memory: asked for at the first exchange, which knows the device.
    limit: the most tokens any rank dispatches at once, or None for exact deliveries. With a limit
    a delivery has room for as many of every rank, or for the slots that its `max_load` allows. The
    host waits for nothing and knows no counts. Rows beyond the real ones have every id -1; those of
    gradients are zeros.
    """

    name = "symmetric memory"
    masks = drops_any_id = True

    def __init__(
        self,
        num_experts: int,
        ranks: tuple[int, int],
        memory: Callable[[Tensor], PeerMemory],
        *,
        limit: RowLimit | None = None,
        kernels: Any = None,
    ) -> None:
        """ranks: how many, and the own one; kernels: instead of those of the device."""
        super().__init__(num_experts, *ranks)
        words = f"num_experts is {num_experts}; needed over {self.name}: at most {MOST_EXPERTS}"
        expect(num_experts <= MOST_EXPERTS, RoutingError, words)
        self._memory_for, self._limit, self._kernels = memory, limit, kernels
        self._memory: PeerMemory | None = None

    def explain(self, error: Exception, doing: str) -> None:
        if self._memory is not None:
            self._memory.explain(error, doing)

    def dispatch(
        self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor, meanwhile: Meanwhile = nothing
    ) -> Received:
        if self._limit is not None:
            self._limit.check(x, topk_idx)
        memory, kernels, stream = self._enter(topk_idx)
        # Here and in no other exchange, because every rank is to raise in the same place.
        memory.check()
        sent, experts = (*_parts(x), topk_idx, topk_weights), self.num_experts
        topk = int(topk_idx.shape[1])
        limit = self._limit
        while True:
            most = memory.most_tokens if limit is None else limit.max_tokens
            slots = _NO_LIMIT if limit is None else limit.slots(topk, _NO_LIMIT)
            # A row that comes has a slot here.
            capacity = most_rows = min(self.world_size * most, slots)
            chunks = -(-most // 32)
            # Over ranks, how many rows come before each word of 32 tokens.
            plan = _made(self.world_size * (self.world_size * chunks + 1), torch.int32, topk_idx)
            self._reserve(most, topk, *sent[:2])
            sequence = memory.next_sequence() if limit is None else 0
            bounds = capacity, slots, sequence
            kernels.send(memory.table, *sent, plan, most, experts, *bounds, stream)
            meanwhile()
            meanwhile = nothing  # where this is not the last time around
            if limit is not None:
                counts, rows = self._room_for(slots, topk_idx), most_rows
                break
            found = memory.counts(sequence, self.num_local_experts)
            if found.most_tokens <= most:
                counts, most_rows = found.slots, max(found.rows)
                rows = found.rows[self.rank]
                break
            # Nothing was sent. All ranks see that, and all make room.
            memory.most_tokens = -(-found.most_tokens * 9 // 8 // 256) * 256
        out = _like(x, rows)
        ids = empty((rows, topk), torch.int64, device_of(topk_idx))
        weights = empty((rows, topk), torch.float32, device_of(topk_idx))
        sources = _made(rows, torch.int32, topk_idx)
        places = empty((int(topk_idx.shape[0]), self.world_size), torch.int32, device_of(topk_idx))
        into = *_parts(out), ids, weights, sources, places
        kernels.take(memory.table, *sent, plan, most, experts, capacity, *into, stream)
        memory.order.leave()
        routes = PeerRoutes(topk_idx, sources, places, most, most_rows)
        return Received(out, ids, weights, counts, routes)

    def _room_for(self, slots: int, like: Tensor) -> list[int] | None:
        """Counts that size the rows of a GPU for so many slots, however they fall on experts."""
        if slots == _NO_LIMIT or not is_cuda(like):
            return None
        local = self.num_local_experts
        return [-(-slots // local) + ROW_ALIGNMENT] * local

    def dispatch_cached(self, x: Tokens, handle: PeerRoutes) -> Tokens:
        memory, kernels, stream = self._enter(handle.sources)
        self._reserve(handle.most_tokens, 0, *_parts(x))
        out, routes = _like(x, int(handle.sources.shape[0])), (handle.places, handle.sources)
        most = handle.most_tokens
        kernels.again(memory.table, *_parts(x), *routes, most, *_parts(out), stream)
        memory.order.leave()
        return out

    def combine(
        self, x: Tensor, handle: PeerRoutes, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        memory, kernels, stream = self._enter(handle.sources)
        tokens, device = int(handle.places.shape[0]), device_of(x)
        most = max(handle.most_rows, 1)
        self._reserve(most, 0, x, weights)
        out = empty((tokens, int(x.shape[1])), x.dtype, device)
        summed = None
        if weights is not None:
            summed = empty((tokens, int(weights.shape[1])), torch.float32, device)
        dispatched = handle.topk_idx, self.num_experts, handle.places, handle.sources
        routes = *dispatched, handle.most_tokens, most
        kernels.back(memory.table, x, weights, *routes, out, summed, stream)
        memory.order.leave()
        return out, summed

    def _enter(self, like: Tensor) -> tuple[PeerMemory, Any, int]:
        """The memory and the kernels for the device of `like`, and the stream that now uses them."""
        if self._memory is None:
            self._memory = self._memory_for(like)
            self._kernels = self._kernels or _kernels(device_name(like))
        return self._memory, self._kernels, self._memory.enter(like)

    def _reserve(self, most: int, topk: int, rows: Tensor, scales: Tensor | None) -> None:
        """Room for `most` rows of any rank, scales or weights beside them."""
        assert self._memory is not None
        widths = (
            part.element_size() * int(part.shape[1]) for part in (rows, scales) if part is not None
        )
        needed = self._kernels.half_bytes(
            self.world_size, most, topk, *widths, *[0] * (scales is None)
        )
        self._memory.reserve(int(needed), rows)


@cache
def _kernels(device: str) -> Any:
    """The module for a GPU; errors as `CudaSource.load`."""
    return peer_rows_source(arch_of(device)).load()


def _made(count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    return empty((count,), dtype, device_of(like))


def _parts(x: Tokens) -> tuple[Tensor, Tensor | None]:
    """Rows, and the scales of codes."""
    if not isinstance(x, BlockScaledTensor):
        return x.contiguous(), None
    return x.bytes.contiguous(), x.scale_inv.contiguous()


def _like(x: Tokens, count: int) -> Tokens:
    """`count` unwritten rows as those of x."""
    rows, scales = _parts(x)
    made = empty((count, int(rows.shape[1])), rows.dtype, device_of(rows))
    if not isinstance(x, BlockScaledTensor) or scales is None:
        return made
    of_codes = empty((count, int(scales.shape[1])), scales.dtype, device_of(rows))
    return BlockScaledTensor(reinterpret(made, torch.float8_e4m3fn), of_codes, x.block, x.code)
