"""Dispatch over collectives whose sizes are known before anybody has routed a token, so that the
host waits for nothing.

Every rank sends all of its rows to all ranks, up to `max_tokens` of them, and each finds its own by
their ids. Which tokens go where decides nothing about the message, so there is nothing to count, to
sort or to gather before it leaves:

    row of a delivery        source rank * max_tokens + token
    rows without a token     at the end of each rank's part, where it has fewer than max_tokens
    rows of other ranks      between the others; their ids are all -1, as those of rows without token

Every rank makes room for `max_tokens` rows of every other, so a rank that sends more, or that was
given another bound than the others, would write into memory that is not there: `RowLimit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError, RankLostError, ShapeError, expect
from ..interop import device_of, empty
from ..quant.format import BlockScaledTensor
from ..routing.ids import NOT_HERE, in_one_spelling
from .collective import (
    ExchangeTransport,
    Routes,
    RowExchange,
    as_words,
    ids_and_weights,
    reinterpret,
)
from .interface import Meanwhile, Received, Tokens, is_lost_rank, nothing

Tensor = torch.Tensor


class FixedSizeTransport(ExchangeTransport):
    """`Transport` over a `RowExchange`; every delivery has `W * max_tokens` rows, and counts stay
    unknown to the host.

    Real rows stand in the order of `CollectiveTransport`, so experts and combine add in the same
    order and give the same bits.
    """

    exact_rows = False

    def __init__(self, num_experts: int, exchange: RowExchange, max_tokens: int) -> None:
        """max_tokens: the most tokens any rank dispatches at once, the same on all ranks."""
        super().__init__(num_experts, exchange)
        self._limit = RowLimit(max_tokens, lambda: exchange)
        self._counts = [max_tokens] * self.world_size

    def dispatch(
        self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor, meanwhile: Meanwhile = nothing
    ) -> Received:
        self._limit.check(x, topk_idx)
        meanwhile()
        ids, weights = ids_and_weights(self._to_all(self._slots(topk_idx, topk_weights)))
        # Global ids become ids of this rank. Weights at slots of other ranks, and those of rows
        # without a token, are whatever they are: the dispatcher masks them by the ids.
        local = in_one_spelling(ids - self.rank * self.num_local_experts, self.num_local_experts)
        routes = Routes(self._places(topk_idx), self._counts, self._counts)
        return Received(self.dispatch_cached(x, routes), local, weights, None, routes)

    def dispatch_cached(self, x: Tokens, handle: Routes) -> Tokens:
        if isinstance(x, BlockScaledTensor):
            held = self._to_all(x.bytes)
            codes = reinterpret(held, torch.float8_e4m3fn)
            return BlockScaledTensor(codes, self._to_all(x.scale_inv), x.block, x.code)
        return self._to_all(x)

    def _slots(self, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """int32 `[max_tokens, 2K]`: ids and the bits of the weights; no id in rows without a token."""
        tokens, topk = (int(size) for size in topk_idx.shape)
        spare, device = self._limit.max_tokens - tokens, topk_idx.device
        filler = torch.full([spare, 2 * topk], NOT_HERE, dtype=torch.int32, device=device)
        if tokens == 0:
            return filler
        slots = as_words(topk_idx, topk_weights)
        return torch.cat([slots, filler], 0) if spare else slots

    def _to_all(self, rows: Tensor) -> Tensor:
        """`[W * max_tokens, .]`: the rows of every rank. Behind those of a rank with fewer than
        `max_tokens` is whatever was in its memory.
        """
        size, tokens = self._limit.max_tokens, int(rows.shape[0])
        shape = (self.world_size * size, int(rows.shape[1]))
        everybodys = empty(shape, rows.dtype, device_of(rows))
        first = self.rank * size
        # Written where they belong, so that the collective moves the rows of other ranks only.
        if tokens:
            everybodys[first : first + tokens] = rows
        gathered = self._exchange.gather(reinterpret(everybodys, torch.uint8))
        return reinterpret(gathered, rows.dtype)

    def _places(self, topk_idx: Tensor) -> Tensor:
        """int64 `[T, W]`: `Routes.places`."""
        goes = self._goes(topk_idx)
        tokens, device = int(topk_idx.shape[0]), topk_idx.device
        ranks = torch.arange(self.world_size, dtype=torch.int64, device=device)
        token = torch.arange(tokens, dtype=torch.int64, device=device).reshape([tokens, 1])
        if tokens == 0:
            return torch.zeros([0, self.world_size], dtype=torch.int64, device=device)
        place = token + ranks * self._limit.max_tokens
        return torch.where(goes, place, torch.full_like(place, NOT_HERE))


class RowLimit:
    """One bound for all ranks of a group, `max_tokens`, and for slots `max_load` times the even share
    of all ranks, where it is given. At the first dispatch ranks compare theirs, over what `exchange`
    makes.
    """

    def __init__(
        self, max_tokens: int, exchange: Callable[[], RowExchange], max_load: float | None = None
    ) -> None:
        check_max_tokens(max_tokens)
        self.max_tokens, self.max_load = max_tokens, max_load
        self._exchange, self._agreed = exchange, False

    def slots(self, topk: int, unlimited: int) -> int:
        """The most slots that a rank may get: its share is as many as a rank sends."""
        if self.max_load is None:
            return unlimited
        return int(self.max_load * self.max_tokens * topk)

    def check(self, x: Tokens, ids: Tensor) -> None:
        """Called by every rank before its dispatch sends anything; the first call is a collective,
        and the only one that waits for the device. Where bounds differ every rank raises.
        """
        rows = int(x.shape[0])
        words = f"x has {rows} rows; this dispatcher was made for max_tokens = {self.max_tokens}"
        expect(rows <= self.max_tokens, ShapeError, words)
        if not self._agreed:
            self._agree("max_tokens", self.max_tokens, ids)
            if self.max_load is not None:
                self._agree("max_load in thousandths", round(1000 * self.max_load), ids)
            self._agreed = True

    def _agree(self, name: str, bound: int, like: Tensor) -> None:
        # A constructor cannot ask: it does not know yet on which device the group exchanges.
        exchange = self._exchange()
        ones = [1] * exchange.world_size
        mine = torch.full([len(ones), 1], bound, dtype=torch.int64, device=device_of(like))
        words = f"{name} is {bound} on rank {exchange.rank}"
        needed = "needed: the same on all ranks"
        if name == "max_tokens":
            needed += "; where it is left out, it is what a rank dispatches"
        try:
            theirs = exchange.exchange(reinterpret(mine, torch.uint8), ones, ones)
            found = reinterpret(theirs, torch.int64).reshape([-1]).tolist()
        except Exception as error:
            if not is_lost_rank(error):
                raise
            raise RankLostError(
                f"{words}, and the others did not compare theirs before the group's timeout: one has died, or they had no more tokens than "
                f"before and this rank has; {needed}"
            ) from error
        others = f"the ranks 0 to {len(ones) - 1} were given {found}; {needed}"
        expect(found == [bound] * len(ones), ConfigError, f"{words}, and {others}")


def check_max_tokens(max_tokens: Any) -> None:
    """Raise ConfigError for what is no bound."""
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if not whole or max_tokens <= 0:
        raise ConfigError(
            f"max_tokens is {max_tokens!r}; needed with wait_for_counts=False: the most tokens "
            "that any rank dispatches at once, a positive integer, the same on all ranks"
        )


def check_max_load(max_load: Any, wait_for_counts: bool) -> None:
    """Raise ConfigError for what is no factor, or one that nothing would heed."""
    if max_load is None:
        return
    is_number = isinstance(max_load, int | float) and not isinstance(max_load, bool)
    if not is_number or not 1 <= max_load < float("inf"):
        needed = "needed: a factor of the even share, from 1 on, or None"
        raise ConfigError(f"max_load is {max_load!r}; {needed}")
    words = f"max_load is {max_load!r}, and wait_for_counts True; needed: one of the two"
    expect(not wait_for_counts, ConfigError, words)
