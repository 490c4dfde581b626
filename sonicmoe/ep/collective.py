"""Dispatch over plain collectives: any framework's `all_to_all`, any backend, any dtype.

Payloads travel as bytes, so that a backend need not know bf16. A dispatch waits once for the
device, because collectives take their sizes from the host; `fixed_size.py` has one that does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..interop import device_of, empty
from ..quant.format import BlockScaledTensor
from ..routing.backends import kernels_for
from ..routing.ids import group_of, in_one_spelling
from .interface import Meanwhile, Received, Tokens, Transport, nothing, zero_where_not_here

Tensor = torch.Tensor


class RowExchange(ABC):
    """The two collectives that a framework must bring."""

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

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """uint8 `[W * M, B]`, M rows of every rank in rank order, of which this rank's are written ->
        the same with the rows of all ranks; in place where the backend can.
        """


@dataclass(frozen=True, eq=False)
class Routes:
    """The way back of one dispatch.

    places int64 `[T, W]`: where the row of a token for a rank stands among the rows that this rank
    sent, -1 where none goes there. Rows per destination and per source rank.
    """

    places: Tensor
    send_counts: Sequence[int]
    recv_counts: Sequence[int]


@dataclass(frozen=True, eq=False)
class RowPlan(Routes):
    """The routes of one dispatch, there too.

    tokens int64 `[S]`: the token of each row that this rank sends, in the order of destination
    ranks.
    """

    tokens: Tensor


class ExchangeTransport(Transport):
    """The way back over a `RowExchange`. Sums of a combine run in fp32 in rank order: equal inputs
    give equal bits.
    """

    def __init__(self, num_experts: int, exchange: RowExchange) -> None:
        super().__init__(num_experts, exchange.world_size, exchange.rank)
        self.name = exchange.name
        self._exchange = exchange

    def combine(
        self, x: Tensor, handle: Routes, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        summed = None if weights is None else self._sum_back(weights, handle)
        return self._sum_back(x, handle), summed

    def _goes(self, topk_idx: Tensor) -> Tensor:
        """bool `[T, W]`: whether a token has an expert on a rank."""
        world, local = self.world_size, self.num_local_experts
        tokens, device = int(topk_idx.shape[0]), topk_idx.device
        # Paddle refuses some of the operations below on tensors without elements. A rank without
        # tokens still takes part in every collective.
        if 0 in tuple(topk_idx.shape):
            return torch.zeros([tokens, world], dtype=torch.int64, device=device) > 0
        # Dropped slots are set apart, so that the rounding of a negative quotient does not matter.
        owner = torch.where(topk_idx >= 0, topk_idx // local, torch.full_like(topk_idx, -1))
        ranks = torch.arange(world, dtype=torch.int64, device=device)
        return (owner.unsqueeze(-1) == ranks).to(torch.int64).sum(1) > 0

    def _move(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        # As bytes, so that a backend need not know the dtype.
        arrived = self._exchange.exchange(
            reinterpret(rows.contiguous(), torch.uint8), send_counts, recv_counts
        )
        return reinterpret(arrived, rows.dtype)

    def _sum_back(self, rows: Tensor, routes: Routes) -> Tensor:
        # The way back is an exchange with the counts swapped. Rows return in the order in which
        # they were sent, so `routes.places` names the rows of each token.
        returned = self._move(rows, routes.recv_counts, routes.send_counts)
        shape = (int(routes.places.shape[0]), int(rows.shape[1]))
        out = empty(shape, rows.dtype, device_of(rows))
        # One kernel that reads each row once and writes each token once. Sums in fp32 tensors
        # would move seven times the bytes, which takes longer than the exchange itself. Nobody
        # reads the third argument: the sum is unweighted.
        kernels_for(rows).aggregate_rows(returned, routes.places, returned, out, False)
        return out


class CollectiveTransport(ExchangeTransport):
    """`Transport` over a `RowExchange`; exact deliveries, for whose sizes the host waits once."""

    def dispatch(
        self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor, meanwhile: Meanwhile = nothing
    ) -> Received:
        # goes[token, rank]: one row however many of the token's slots that rank owns.
        goes = self._goes(topk_idx)
        # One line per destination rank: the number of rows, then the slots of each of its experts.
        # Its width does not depend on the data, so it can travel before anybody knows a size.
        sent = self._counts(goes, topk_idx)
        arrived = self._move(sent, [1] * self.world_size, [1] * self.world_size)
        # Whatever needs no sizes is launched before the host waits, because the device idles from
        # then until the next launch.
        order, places = self._order(goes, topk_idx, topk_weights), _places(goes)
        message = _message(x)
        meanwhile()
        # Collectives take their sizes from the host, so here the host waits for the device. Both
        # tables reach it in one copy.
        shape = [2, self.world_size, 1 + self.num_local_experts]
        sends, comes = torch.cat([sent, arrived]).reshape(shape).tolist()
        send_counts, recv_counts = ([line[0] for line in lines] for lines in (sends, comes))
        tokens, slots = (values[: sum(send_counts)] for values in order)
        plan = RowPlan(places, send_counts, recv_counts, tokens)
        idx, weights = ids_and_weights(self._move(slots, send_counts, recv_counts))
        # Every source rank has counted its own slots for these experts; their sum is the true count
        # of each.
        counts = [sum(of_expert) for of_expert in zip(*(line[1:] for line in comes), strict=True)]
        return Received(self._send_rows(message, x, plan), idx, weights, counts, plan)

    def dispatch_cached(self, x: Tokens, handle: RowPlan) -> Tokens:
        return self._send_rows(_message(x), x, handle)

    def _send_rows(self, message: Tensor, x: Tokens, plan: RowPlan) -> Tokens:
        # No size is exchanged any more: the plan has them all.
        rows = _take_rows(message, plan.tokens)
        arrived = self._move(rows, plan.send_counts, plan.recv_counts)
        return _unpacked(arrived, x) if isinstance(x, BlockScaledTensor) else arrived

    def _counts(self, goes: Tensor, topk_idx: Tensor) -> Tensor:
        """int64 `[W, 1 + L]`: rows for each rank, and slots of each of its experts."""
        world, local = self.world_size, self.num_local_experts
        # Experts are dealt out in consecutive ranges, so reshaping the counts gives a line per
        # rank.
        slots = _count_slots(topk_idx, self.num_experts).reshape([world, local])
        if int(goes.shape[0]) == 0:
            return torch.cat([torch.zeros_like(slots)[:, :1], slots], 1)
        return torch.cat([goes.to(torch.int64).sum(0).reshape([world, 1]), slots], 1)

    def _order(self, goes: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """For every row that is sent, its token int64, and its slots as the receiver reads them,
        int32 `[., 2K]`, ids and then the bits of the weights. Both are longer than there are rows:
        as long as they are at most.
        """
        (tokens, world), topk = (int(n) for n in goes.shape), int(topk_idx.shape[1])
        most, device = tokens * min(world, topk), goes.device
        if most == 0:
            token = torch.zeros([0], dtype=torch.int64, device=device)
            return token, torch.zeros([0, 2 * topk], dtype=torch.int32, device=device)
        running = _running(goes).reshape([world * tokens])
        flat = goes.t().reshape([world * tokens])
        # Pairs of token and rank without a row all write one place more, which nobody reads.
        place = torch.where(flat, running - 1, torch.full_like(running, most))
        pairs = torch.zeros([most + 1], dtype=torch.int64, device=device)
        pairs[place] = torch.arange(world * tokens, dtype=torch.int64, device=device)
        token, rank = pairs % tokens, (pairs // tokens).to(torch.int32)
        slots = torch.index_select(as_words(topk_idx, topk_weights), 0, token)
        # Global ids become ids of the receiving rank. Slots of other ranks fall outside [0, L)
        # then, and become -1 with weight 0.
        local = self.num_local_experts
        idx = in_one_spelling(slots[:, :topk] - (rank * local).reshape([-1, 1]), local)
        return token, torch.cat([idx, zero_where_not_here(slots[:, topk:], idx, local)], 1)


def _count_slots(ids: Tensor, num_experts: int) -> Tensor:
    """int64 `[num_experts]`: slots per expert. Unlike `bincount` it does not wait for the device."""
    counts = torch.zeros([num_experts + 1], dtype=torch.int64, device=ids.device)
    if 0 not in tuple(ids.shape):
        group = group_of(ids.reshape([-1]), num_experts)
        counts.index_add_(0, group, torch.ones_like(group))
    return counts[:num_experts]


def _running(goes: Tensor) -> Tensor:
    """int64 `[W, T]`: how many rows come up to here, rank by rank, tokens ascending. That is the
    order of rows in which `all_to_all` cuts its input, and the order that the contract of
    `Dispatched` promises.
    """
    tokens, world = (int(size) for size in goes.shape)
    flat = goes.to(torch.int64).t().reshape([world * tokens])
    return torch.cumsum(flat, 0).reshape([world, tokens])


def _places(goes: Tensor) -> Tensor:
    """int64 `[T, W]`: `RowPlan.places`."""
    if 0 in tuple(goes.shape):
        return torch.zeros(list(goes.shape), dtype=torch.int64, device=goes.device)
    running = _running(goes).t()
    return torch.where(goes, running - 1, torch.full_like(running, -1)).contiguous()


def as_words(ids: Tensor, weights: Tensor) -> Tensor:
    """int32 `[., 2K]`: ids, which fit into 32 bits, and behind them the bits of the weights."""
    return torch.cat([ids.to(torch.int32), reinterpret(weights, torch.int32)], 1)


def ids_and_weights(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `as_words`: int64 and fp32 `[., K]`."""
    topk = int(slots.shape[1]) // 2
    weights = slots[:, topk:].contiguous()
    return slots[:, :topk].to(torch.int64), reinterpret(weights, torch.float32)


def _message(x: Tokens) -> Tensor:
    """One row a token; of codes int32 `[T, ceil(H/4) + scales]`, because Paddle selects no rows of
    bytes on a host.
    """
    if not isinstance(x, BlockScaledTensor):
        return x
    held, (tokens, hidden) = x.bytes, x.shape
    if hidden % 4:
        fill = torch.zeros([tokens, 4 - hidden % 4], dtype=torch.uint8, device=held.device)
        held = torch.cat([held, fill], 1)
    words = (held.contiguous(), x.scale_inv.contiguous())
    return torch.cat([reinterpret(part, torch.int32) for part in words], 1)


def _unpacked(rows: Tensor, sent: BlockScaledTensor) -> BlockScaledTensor:
    """The tokens of `_message` rows; widths are those of the tokens that this rank sent."""
    hidden = sent.shape[1]
    words = -(-hidden // 4)
    held = reinterpret(rows[:, :words].contiguous(), torch.uint8)[:, :hidden].contiguous()
    scales = reinterpret(rows[:, words:].contiguous(), torch.float32)
    codes = reinterpret(held, torch.float8_e4m3fn)
    return BlockScaledTensor(codes, scales, sent.block, sent.code)


def _take_rows(values: Tensor, rows: Tensor) -> Tensor:
    # An empty index is answered by a slice, which both frameworks accept.
    return torch.index_select(values, 0, rows) if int(rows.shape[0]) else values[:0]


def reinterpret(values: Tensor, dtype: Any) -> Tensor:
    """Bytes read as `dtype` along the last axis; `[0, .]` tensors, which Paddle cannot view,
    are made anew.
    """
    if values.dtype == dtype:
        return values
    if int(values.shape[0]) == 0:
        # Paddle makes no zeros of e4m3, which is one byte wide.
        made = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        element = torch.zeros([1], dtype=made).element_size()
        width = int(values.shape[1]) * values.element_size() // element
        zeros = torch.zeros([0, width], dtype=made, device=values.device)
        return zeros if made == dtype else zeros.to(dtype)
    return values.view(dtype)
