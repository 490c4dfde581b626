"""The contracts of dispatchers and transports: data and raw collectives, no autograd.

Legend: T tokens of this rank, K slots, H hidden, W ranks of the group, E experts of the whole
group, L = E / W local experts, R rows received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import RankLostError, RoutingError, ShapeError, SonicMoEError, expect
from ..interop import IS_PADDLE, is_cuda, require_framework_tensor, require_same_device
from ..quant.format import BlockScaledTensor
from ..refusals import need_dtype, need_shape
from ..routing.ids import is_here
from .fp8_rows import SentGradient

Tensor = torch.Tensor
Tokens = Tensor | BlockScaledTensor
Meanwhile = Callable[[], None]
TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Words of gloo, of Paddle's gloo, of NCCL and of DeepEP for a peer that is gone.
_SIGNS = (
    *("connection closed by peer", "connection reset by peer", "broken pipe"),
    *("timed out", "timeout", "gloo", "nccl", "deepep"),
)


class Dispatched(NamedTuple):
    """The tokens of one dispatch, in the order of the node's arguments.

    x: `[R, H]`, one row per (token, rank): a token that picked several experts of this rank comes
        once. Rows are in source-rank order, then source-token order. R may be 0.
    tokens_per_expert: true counts of the L local experts, None where the host does not know them,
        or under `max_load` counts that make room for as many slots as it allows.
    indices: int64 `[R, K]`: local ids in `[0, L)`, -1 where the slot belongs to another rank or was
    dropped; slots keep their position.
    probs: fp32 `[R, K]`, exactly 0 where `indices` is -1.
    handle: the routes of this dispatch, for `combine`; opaque to callers.
    x_scale, dx_to: of tokens that travelled in FP8, arguments of the node by these names: x is then
        e4m3, and its gradient, which is that of the tokens before they were quantised, goes to
        `dx_to` (None without autograd).
    dout_source: where gradients travel in FP8, the argument of the node by this name.

    Rows beyond the real ones, or between them, have every index -1; only a dispatch that does not
    wait for counts delivers them. Nobody may read their x: it is whatever was in memory, or a token
    for another rank.
    """

    x: Tensor
    tokens_per_expert: list[int] | None
    indices: Tensor
    probs: Tensor
    handle: Any
    x_scale: Tensor | None = None
    dx_to: Tensor | None = None
    dout_source: SentGradient | None = None


@dataclass(frozen=True, eq=False)
class Received:
    """A transport's raw delivery; fields as in `Dispatched`, but x as it was sent."""

    x: Tokens
    topk_idx: Tensor
    topk_weights: Tensor
    tokens_per_expert: list[int] | None
    handle: Any


def nothing() -> None:
    """The caller has nothing to do in the meantime."""


class Transport(ABC):
    """Moves rows between the ranks of one group. Every method is a collective: all ranks call it,
    in one order, also with no rows. RoutingError where the experts cannot be split evenly.

    Args:
        num_experts: E; expert `e` lives on rank `e // (E / W)`.
        world_size, rank: of the group.

    Attributes:
        exact_rows: whether rows of `dispatch_cached` need no mask: every one is real, or zeros.
        masks: whether weights that it delivers are exactly 0 where a slot is not here, and those that
            a combine gets count only where the slot is of that rank.
        drops_any_id: whether it drops a slot by any id outside [0, E), and not by -1 alone.
        moves: whether rows leave this process. Where they do not, a combine without quantised
            gradients is the experts' output itself.
    """

    name: str
    exact_rows: bool = True
    masks: bool = False
    drops_any_id: bool = False
    moves: bool = True

    def __init__(self, num_experts: int, world_size: int, rank: int) -> None:
        check_num_experts(num_experts, world_size)
        self.num_experts, self.world_size, self.rank = num_experts, world_size, rank

    def __deepcopy__(self, memo: Any) -> Transport:
        """Copies of a layer share the group, and the library's buffers with it."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            f"the dispatcher over {self.name} belongs to a group of processes, which no file can "
            "hold; needed: the state_dict of the layer, or a new dispatcher where it is loaded"
        )

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.world_size

    def explain(self, error: Exception, doing: str) -> None:
        """Raise a `RankLostError` that names the operation, if `error` says that a rank is gone."""
        raise_lost_rank(error, doing, self.name, self.rank, self.world_size)

    def check_quantised(self, hidden: int) -> None:  # noqa: B027  most send any
        """Refuse quantised rows of `hidden` columns where it cannot send them; called before the
        forward sends anything, because gradients follow in a backward.
        """

    @abstractmethod
    def dispatch(
        self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor, meanwhile: Meanwhile = nothing
    ) -> Received:
        """Send each of the T rows to every rank that holds one of its experts; `topk_idx` int64
        `[T, K]` in `[0, E)`, or -1, which is dropped, and where `drops_any_id` any other id as well.
        Quantised tokens arrive as they were sent.
        meanwhile: called once, before the host waits for counts, when all is launched that needs none.
        """

    @abstractmethod
    def dispatch_cached(self, x: Tokens, handle: Any) -> Tokens:
        """Send `[T, H]` rows along the routes of an earlier dispatch -> `[R, H]`, quantised ones as
        they are.
        """

    @abstractmethod
    def combine(
        self, x: Tensor, handle: Any, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send `[R, H]` back and sum per token, unweighted -> `[T, H]` in x's dtype; fp32 weights
        `[R, K]` likewise -> `[T, K]`.
        """


def check_num_experts(num_experts: Any, world_size: int, name: str = "num_experts") -> None:
    """Raise RoutingError where the experts cannot be split evenly over the ranks."""
    # A bool is an int in Python.
    whole = isinstance(num_experts, int) and not isinstance(num_experts, bool)
    needed = f"{world_size} ranks need a positive multiple of {world_size}"
    fits = whole and num_experts > 0 and num_experts % world_size == 0
    expect(fits, RoutingError, f"{name} is {num_experts!r}; {needed}")


def check_dispatch(x: Any, topk_idx: Any, topk_weights: Any) -> None:
    """Check the arguments of a dispatch without reading device memory."""
    for name, value in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        require_framework_tensor(value, name)
    need_dtype("x", x, *TOKEN_DTYPES)
    need_dtype("topk_idx", topk_idx, torch.int64, torch.int32)
    need_dtype("topk_weights", topk_weights, torch.float32)
    need_shape(len(x.shape) == 2, "x", x, "[T, H]")
    need_shape(len(topk_idx.shape) == 2, "topk_idx", topk_idx, "[T, K]")
    wanted = (int(x.shape[0]), int(topk_idx.shape[1]))
    for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        words = f"{name} has shape {tuple(value.shape)}; x and topk_idx need {wanted}"
        expect(tuple(value.shape) == wanted, ShapeError, words)
    # Values are not checked: reading ids would wait for the device. Invalid ids count as dropped
    # instead.
    require_same_device([("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)])


def zero_where_not_here(values: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """`values` `[., K]` with exact zeros where `indices` names none of `num_experts` experts.

    It selects and does not multiply by a mask, because libraries leave these slots unwritten and
    NaN times zero is NaN.
    """
    return torch.where(is_here(indices, num_experts), values, torch.zeros_like(values))


def zero_rows_unless(real: Tensor, rows: Tensor) -> Tensor:
    """`rows` `[R, .]` with exact zeros where `real`, bool `[R]`, is False; likewise by selection."""
    chosen, zeros = real.reshape([-1, 1]), torch.zeros_like(rows)
    # Paddle has no `where` of 16-bit floats on a host. fp32 holds each of their values.
    if IS_PADDLE and not is_cuda(rows):
        wide = torch.where(chosen, rows.to(torch.float32), zeros.to(torch.float32))
        return wide.to(rows.dtype)
    return torch.where(chosen, rows, zeros)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a library says that another rank does not answer."""
    if isinstance(error, SonicMoEError) or not isinstance(error, RuntimeError | OSError):
        return False
    said = str(error).lower()
    return any(sign in said for sign in _SIGNS)


def raise_lost_rank(error: Exception, doing: str, library: str, rank: int, ranks: int) -> None:
    """Raise a `RankLostError` from `error` if it says that a rank is gone; else return.

    A rank that dies shows on the others as a closed connection, or as silence until the group's
    timeout, and libraries report it in the words of their sockets. One sentence says which
    operation it was, among how many ranks, what the library saw, and where to look.
    """
    if not is_lost_rank(error):
        return
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Paddle's errors begin with a stack of C++ calls; the line with the sign is the news.
    reason = next((line for line in lines if any(s in line.lower() for s in _SIGNS)), lines[0])
    raise RankLostError(
        f"rank {rank} of {ranks} lost another rank in the {doing} over {library}: {reason[:300]}; "
        "that rank has died or did not answer before the group's timeout, and its own log says "
        "why. This step cannot be finished: start all ranks again from the last checkpoint"
    ) from error
