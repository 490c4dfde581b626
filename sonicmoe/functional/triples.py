"""General routing: (token, expert, score) triples -> the table `[T, K]` that engines route by."""

from __future__ import annotations

from numbers import Integral

import torch

from ..config import current_config
from ..errors import RoutingError, ShapeError, expect
from ..interop import is_cuda, require_framework_tensor
from ..refusals import need_dtype, need_shape
from ..routing.ids import group_of

Tensor = torch.Tensor


def count_cumsum(x: Tensor, E: int, do_cumsum: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Occurrences of each id in `[0, E)` and their inclusive prefix sum.

    Args:
        x: int32 or int64 `[N]`; ids outside `[0, E)` are not counted.
        E: number of experts.
        do_cumsum: also return the prefix sum.

    Returns:
        int32 `[E]` counts, or `(counts, inclusive prefix sum)`.
    """
    require_framework_tensor(x, "x")
    # The compiler knows `int`, and numpy's integers are `Integral`.
    whole = isinstance(E, int | Integral) and not isinstance(E, bool)
    expect(whole and E >= 0, ShapeError, f"E is {E!r}; needed: an integer, at least 0")
    need_shape(len(x.shape) == 1, "x", x, "one axis")
    need_dtype("x", x, torch.int32, torch.int64)
    counts = frequency_of(x, E)
    return (counts, torch.cumsum(counts, 0, dtype=torch.int32)) if do_cumsum else counts


def frequency_of(ids: Tensor, E: int) -> Tensor:
    """int32 `[E]`: how often each expert is named."""
    ids = ids.to(torch.int64)
    group = group_of(ids, E)
    # Not bincount, whose size depends on the values: it waits for the GPU, and no graph can hold
    # it.
    # One bin more than experts takes the ids that are not here, and is cut off.
    counts = torch.zeros(E + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add(0, group, torch.ones_like(group, dtype=torch.int32))[:E]


def triples_to_topk(
    scores: Tensor, tokens: Tensor, experts: Tensor, num_tokens: int, topk: int | None
) -> tuple[Tensor, Tensor]:
    """Sorted triples, which were checked, -> `[T, topk]` indices (-1 filled) and fp32 probabilities,
    differentiable in the scores.
    """
    tokens = tokens.to(torch.int64)
    # The triples become a table [T, topk]. Rows outside x are counted in an extra bin at the end,
    # so that one copy to the host brings the width of the table, the strays and the order.
    inside = (tokens >= 0) & (tokens < num_tokens)
    bins = torch.where(inside, tokens, torch.full_like(tokens, num_tokens))
    counted = frequency_of(bins, num_tokens + 1)
    per_token, strays = counted[:num_tokens].to(torch.int64), counted[num_tokens]
    topk = _check_token_indices(tokens, per_token, strays, topk)
    # Triples are sorted by token: a triple's slot is its distance from the token's first triple.
    first = torch.cumsum(per_token, 0) - per_token
    slot = tokens * topk + torch.arange(int(tokens.shape[0]), device=tokens.device) - first[tokens]
    # Slots that no triple fills stay -1, which routing reads as "not here".
    indices = torch.full((num_tokens * topk,), -1, dtype=torch.int64, device=tokens.device)
    indices = indices.index_put((slot,), experts.to(torch.int64))
    # `index_put` out of place, so that autograd carries the gradient back to the scores.
    probs = torch.zeros(num_tokens * topk, dtype=torch.float32, device=tokens.device).index_put(
        (slot,), scores.to(torch.float32)
    )
    return indices.reshape(num_tokens, topk), probs.reshape(num_tokens, topk)


def _check_token_indices(
    tokens: Tensor, per_token: Tensor, strays: Tensor, topk: int | None
) -> int:
    """The width of the table: `topk` where the caller gave it, else read from the device.

    With `topk` nothing waits for a GPU. A wrong argument then cannot raise here, so the device
    itself asserts it (`torch._assert_async`).
    """
    whole = isinstance(topk, int | Integral) and not isinstance(topk, bool)
    words = f"max_experts_per_token is {topk!r}; needed: an integer, at least 1"
    expect(topk is None or (whole and topk >= 1), ShapeError, words)
    num_tokens = int(per_token.shape[0])
    most = per_token.max() if num_tokens else torch.zeros_like(strays)
    unsorted = (tokens[1:] < tokens[:-1]).any()
    # On a host reading a value waits for nothing, and with `validate_dispatch` the user accepts the
    # wait. Inside a graph no value can be read at all, and under FakeTensorMode there is none.
    has_values = not torch.compiler.is_compiling() and type(tokens).__name__ != "FakeTensor"
    may_wait = has_values and (current_config().validate_dispatch or not is_cuda(tokens))
    if topk is not None and not may_wait:
        torch._assert_async(
            ~unsorted & (strays == 0) & (most <= topk),
            f"token_indices is not ascending, leaves [0, {num_tokens}), or names a token more than {topk} times",
        )
        return topk
    # Three numbers in one tensor, because each copy to the host waits for the device.
    found, outside, shuffled = torch.stack(
        [most.to(torch.int64), strays.to(torch.int64), unsorted.to(torch.int64)]
    ).tolist()
    expect(not shuffled, RoutingError, "token_indices is not ascending; sort the triples by token")
    expect(
        outside == 0,
        RoutingError,
        f"token_indices holds {outside} ids outside [0, {num_tokens}), the rows of x",
    )
    expect(
        topk is None or found <= topk,
        RoutingError,
        f"token_indices names a token {found} times; max_experts_per_token is {topk}",
    )
    return max(1, found) if topk is None else topk
