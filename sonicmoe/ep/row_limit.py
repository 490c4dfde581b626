"""The most rows that a rank dispatches at once, the bound of deliveries that nobody counts.

Every rank makes room for that many rows of every other, so a rank that sends more, or that was
given another bound than the others, would write into memory that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError, ShapeError, expect
from ..interop import device_of
from .collective import RowExchange, reinterpret
from .interface import Tokens

Tensor = torch.Tensor


class RowLimit:
    """One bound for all ranks of a group, `max_tokens`. At the first dispatch ranks compare theirs,
    over what `exchange` makes.
    """

    def __init__(self, max_tokens: int, exchange: Callable[[], RowExchange]) -> None:
        check_max_tokens(max_tokens)
        self.max_tokens, self._exchange, self._agreed = max_tokens, exchange, False

    def check(self, x: Tokens, ids: Tensor) -> None:
        """Called by every rank before its dispatch sends anything; the first call is a collective,
        and the only one that waits for the device. Where bounds differ every rank raises.
        """
        require_rows(x, self.max_tokens)
        if not self._agreed:
            self._agree(ids)
            self._agreed = True

    def _agree(self, like: Tensor) -> None:
        # A constructor cannot ask: it does not know yet on which device the group exchanges.
        exchange = self._exchange()
        ones = [1] * exchange.world_size
        bound, device = self.max_tokens, device_of(like)
        mine = torch.full([len(ones), 1], bound, dtype=torch.int64, device=device)
        theirs = exchange.exchange(reinterpret(mine, torch.uint8), ones, ones)
        found = reinterpret(theirs, torch.int64).reshape([-1]).tolist()
        words = f"max_tokens is {bound} on rank {exchange.rank}"
        others = f"the ranks 0 to {len(ones) - 1} were given {found}; needed: the same on all ranks"
        expect(found == [bound] * len(ones), ConfigError, f"{words}, and {others}")


def check_max_tokens(max_tokens: Any) -> None:
    """Raise ConfigError for what is no bound."""
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if not whole or max_tokens <= 0:
        raise ConfigError(
            f"max_tokens is {max_tokens!r}; needed with wait_for_counts=False: the most tokens "
            "that any rank dispatches at once, a positive integer, the same on all ranks"
        )


def require_rows(x: Tokens, max_tokens: int) -> None:
    """Raise ShapeError for more rows than there is room for."""
    rows = int(x.shape[0])
    words = f"x has {rows} rows; this dispatcher was made for max_tokens = {max_tokens}"
    expect(rows <= max_tokens, ShapeError, words)
