"""Dispatch over plain collectives: any framework's `all_to_all`, any backend, any dtype.

Payloads travel as bytes, so that a backend need not know bf16. A dispatch waits twice for the
device: `nonzero` has to know its size, and collectives take their sizes from the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..quant.format import BlockScaledTensor
from ..routing.ids import count_experts, in_one_spelling
from .interface import Received, Tokens, Transport, zero_where_not_here

Tensor = torch.Tensor


class RowExchange(ABC):
    """The one collective that a framework must bring."""

    name: str
    world_size: int
    rank: int

    @abstractmethod
    def exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """uint8 `[sum(send_counts), B]` in rank order -> `[sum(recv_counts), B]` in rank order;
        either side may be empty.
        """


@dataclass(frozen=True, eq=False)
class Plan:
    """The routes of one dispatch: `tokens` int64 `[S]`, the token of each row that this rank sends,
    in the order of destination ranks; rows per destination and per source rank; and T.
    """

    tokens: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    num_tokens: int


class CollectiveTransport(Transport):
    """`Transport` over a `RowExchange`. Sums of a combine run in fp32 in rank order: equal inputs
    give equal bits.
    """

    def __init__(self, num_experts: int, exchange: RowExchange) -> None:
        super().__init__(num_experts, exchange.world_size, exchange.rank)
        self.name = exchange.name
        self._exchange = exchange

    def dispatch(self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor) -> Received:
        # `sent` has one line per destination rank: the number of rows, then the slots of each of
        # its experts. Its width does not depend on the data, so it can travel before anybody knows
        # a size.
        tokens, ranks, sent = self._destinations(topk_idx)
        width = 1 + self.num_local_experts
        # Ranks first tell each other how many rows come, and how many slots for each of their
        # experts. Both tables then reach the host in one copy.
        arrived = self._move(sent, [1] * self.world_size, [1] * self.world_size)
        table = torch.cat([sent, arrived]).reshape([2, self.world_size, width]).tolist()
        # Collectives take their sizes from the host, so here the host waits for the device.
        plan = Plan(
            tokens, [row[0] for row in table[0]], [row[0] for row in table[1]], int(x.shape[0])
        )
        # Every source rank has counted its own slots for these experts; their sum is the true count
        # of each.
        counts = [
            sum(row[1 + expert] for row in table[1]) for expert in range(self.num_local_experts)
        ]
        recv_idx, recv_weights = self._move_slots(topk_idx, topk_weights, ranks, plan)
        return Received(self.dispatch_cached(x, plan), recv_idx, recv_weights, counts, plan)

    def dispatch_cached(self, x: Tokens, handle: Plan) -> Tokens:
        if isinstance(x, BlockScaledTensor):
            return _unpacked(self._send_rows(_packed(x), handle), x)
        return self._send_rows(x, handle)

    def _send_rows(self, x: Tensor, plan: Plan) -> Tensor:
        # No size is exchanged any more: the plan has them all.
        return self._move(_take_rows(x, plan.tokens), plan.send_counts, plan.recv_counts)

    def combine(
        self, x: Tensor, handle: Plan, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self._sum_back(x, handle), None if weights is None else self._sum_back(
            weights, handle
        )

    def _destinations(self, topk_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(tokens [S], destination rank [S], counts [W, 1 + L])`: rank by rank, tokens ascending;
        counts of rows, then of slots.
        """
        local, world = self.num_local_experts, self.world_size
        # Experts are dealt out in consecutive ranges, so reshaping the counts gives a line per
        # rank.
        slots = count_experts(topk_idx, self.num_experts).reshape([world, local])
        # Paddle refuses some of the operations below on tensors without elements. A rank without
        # tokens still takes part in every collective, with counts of zero.
        if int(topk_idx.shape[0]) == 0:
            empty = torch.zeros([0], dtype=torch.int64, device=topk_idx.device)
            return empty, empty, torch.cat([torch.zeros_like(slots)[:, :1], slots], 1)
        # Dropped slots are set apart, so that the rounding of a negative quotient does not matter.
        owner = torch.where(topk_idx >= 0, topk_idx // local, torch.full_like(topk_idx, -1))
        # goes[rank, token]: one row however many of the token's slots that rank owns.
        goes = torch.stack([(owner == rank).to(torch.int64).sum(1) > 0 for rank in range(world)])
        # `nonzero` lists positions row by row: rank by rank, tokens ascending. That is the order of
        # rows in which `all_to_all` cuts its input, and the order that the contract of `Dispatched`
        # promises.
        pairs = torch.nonzero(goes)
        rows = goes.to(torch.int64).sum(1).reshape([world, 1])
        return pairs[:, 1].contiguous(), pairs[:, 0].contiguous(), torch.cat([rows, slots], 1)

    def _move_slots(
        self, topk_idx: Tensor, topk_weights: Tensor, ranks: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Local ids int64 and weights fp32 `[R, K]`, both in one message."""
        topk = int(topk_idx.shape[1])
        idx, weights = _take_rows(topk_idx, plan.tokens), _take_rows(topk_weights, plan.tokens)
        if int(idx.shape[0]):
            # Global ids become ids of the receiving rank. Slots of other ranks fall outside [0, L)
            # then, and become -1 with weight 0.
            first = (ranks * self.num_local_experts).reshape([-1, 1])
            idx = in_one_spelling(idx - first, self.num_local_experts)
            weights = zero_where_not_here(weights, idx, self.num_local_experts)
        # Ids fit into 32 bits and weights have 32, so both travel as one int32 matrix in one
        # message. The weights' bits are reinterpreted and not converted.
        packed = torch.cat([idx.to(torch.int32), _reinterpret(weights, torch.int32)], 1)
        moved = self._move(packed, plan.send_counts, plan.recv_counts)
        return moved[:, :topk].to(torch.int64), _reinterpret(
            moved[:, topk:].contiguous(), torch.float32
        )

    def _move(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        # As bytes, so that a backend need not know the dtype.
        arrived = self._exchange.exchange(
            _reinterpret(rows.contiguous(), torch.uint8), send_counts, recv_counts
        )
        return _reinterpret(arrived, rows.dtype)

    def _sum_back(self, rows: Tensor, plan: Plan) -> Tensor:
        # The way back is the same exchange with the counts swapped. Rows return in the order in
        # which they were sent, so `plan.tokens` names the token of each.
        returned = self._move(rows, plan.recv_counts, plan.send_counts)
        total = torch.zeros(
            [plan.num_tokens, int(rows.shape[1])], dtype=torch.float32, device=rows.device
        )
        start = 0
        # Rank by rank, so that a token's parts are added in the order of ranks. Within one rank a
        # token occurs once, so `index_add_` has no order of additions to choose.
        for count in plan.send_counts:
            if count:
                span = slice(start, start + count)
                total.index_add_(0, plan.tokens[span], returned[span].to(torch.float32))
            start += count
        return total.to(rows.dtype)


def _packed(x: BlockScaledTensor) -> Tensor:
    """int32 `[T, ceil(H/4) + scales]`: codes and scales of a token in one row, one message. As
    int32, because Paddle selects no rows of bytes on a host.
    """
    held, (tokens, hidden) = x.bytes, x.shape
    if hidden % 4:
        fill = torch.zeros([tokens, 4 - hidden % 4], dtype=torch.uint8, device=held.device)
        held = torch.cat([held, fill], 1)
    words = (held.contiguous(), x.scale_inv.contiguous())
    return torch.cat([_reinterpret(part, torch.int32) for part in words], 1)


def _unpacked(rows: Tensor, sent: BlockScaledTensor) -> BlockScaledTensor:
    """The tokens of `_packed` rows; widths are those of the tokens that this rank sent."""
    hidden = sent.shape[1]
    words = -(-hidden // 4)
    held = _reinterpret(rows[:, :words].contiguous(), torch.uint8)[:, :hidden].contiguous()
    scales = _reinterpret(rows[:, words:].contiguous(), torch.float32)
    codes = _reinterpret(held, torch.float8_e4m3fn)
    return BlockScaledTensor(codes, scales, sent.block, sent.code)


def _take_rows(values: Tensor, rows: Tensor) -> Tensor:
    # An empty index is answered by a slice, which both frameworks accept.
    return torch.index_select(values, 0, rows) if int(rows.shape[0]) else values[:0]


def _reinterpret(values: Tensor, dtype: Any) -> Tensor:
    """The same bytes as `dtype` along the last axis; `[0, .]` tensors, which Paddle cannot view,
    are made anew.
    """
    if values.dtype == dtype:
        return values
    if int(values.shape[0]) == 0:
        # Paddle makes no zeros of e4m3, which is one byte wide.
        made = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        width = (
            int(values.shape[1])
            * values.element_size()
            // torch.zeros([1], dtype=made).element_size()
        )
        zeros = torch.zeros([0, width], dtype=made, device=values.device)
        return zeros if made == dtype else zeros.to(dtype)
    return values.view(dtype)
