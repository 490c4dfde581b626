"""Names that PaddleFleet's in-tree copy of `run_sonic_moe` reads. It binds them when it is imported,
so they must be there; it runs only where `run_sonic_moe` cannot be imported.

Most are routing metadata in the form of Fleet's own engine: its order of arguments, and a tuple. Code
that reads the tuple waits for the device, because three of its elements are Python numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ..config import active_config
from ..errors import EngineUnavailableError, RoutingError, ShapeError, expect
from ..interop import plain_ops, require_framework_tensor
from ..refusals import need_shape
from ..routing.build import build_routing
from ..routing.ids import is_here
from ..routing.metadata import ROW_ALIGNMENT, RoutingMetadata
from ..routing.reference import exact_routing
from ..routing.validation import check_counts, check_indices_and_probs, host_counts_of
from .carrier import GROUP_COLUMNS, GROUPS_PER_WORD

Tensor = torch.Tensor


def deepep_topk_to_sonic_metadata(
    dispatched_indices: Tensor,
    dispatched_probs: Tensor,
    tokens_per_expert: Any,
    E: int,
    device: Any = None,
    block: int = ROW_ALIGNMENT,
) -> tuple[Any, ...]:
    """The ten elements that PaddleFleet unpacks.

    A position is the place of a slot with an expert among all of them, token after token and by
    ascending expert inside a token; there are TK. A row is a place in the expert-sorted layout;
    there are TKp, TK of them true and the others padding.

    | element | shape, dtype | value |
    |---|---|---|
    | expert offsets | int32 `[E+1]` | first row of each expert, and TKp |
    | x_gather | int32 `[TKp]` | token of a row; 0 for padding |
    | s_scatter | int32 `[TKp]` | position of a row; for padding TK, TK+1, ... in order of rows |
    | s_reverse_scatter | int32 `[TK]` | row of a position |
    | active experts per token | int32 `[N+1]` | first position of each token, and TK |
    | scores | fp32 `[TKp]` | probability of a position; 0 from TK on |
    | TKp, padding rows, N | int | |
    | score_src | int32 `[TK]` | flat slot (token * K + k) of a position; None where TK is 0 |

    Args:
        dispatched_indices: int32 or int64 `[N, K]`, local expert ids (docs/design.md, "Routing
            contract").
        dispatched_probs: fp32 `[N, K]`, read where the id is an expert.
        tokens_per_expert: E counts on the host, true or rounded up, which are checked; a GPU
            tensor, None or []: counted from the indices.
        E: local experts.
        device: unused; the results lie where the indices lie.
        block: rows every expert is padded to, at least 1.

    Raises:
        RoutingError, ShapeError, DTypeError, DeviceError, FrameworkError: naming the argument, what
            came and what is needed.
    """
    words = f"block is {block!r}; needed: an int >= 1"
    expect(isinstance(block, int) and block > 0, RoutingError, words)
    check_indices_and_probs(dispatched_indices, dispatched_probs, E)
    # Three elements are numbers, which no gradient could pass.
    with plain_ops():
        indices, probs = dispatched_indices.detach(), dispatched_probs.detach()
        routing = _routing(indices, probs, E, block)
        counts = routing.counts_on_host()
        if (given := host_counts_of(tokens_per_expert, E)) is not None:
            check_counts(given, counts)
        return _as_tuple(routing, probs, sum(counts))


def deepep_topk_to_sonic_metadata_with_scales(
    dispatched_indices: Tensor,
    dispatched_probs: Tensor,
    tokens_per_expert: Any,
    E: int,
    raw_scales: Tensor,
    cols: int,
    device: Any = None,
    block: int = ROW_ALIGNMENT,
    **prepared: Any,
) -> tuple[Any, ...]:
    """The ten elements, and None in place of packed scales and of prepared outputs.

    Fleet's own engine packs scales for the tensor cores of compute capability 10, in the order of
    rows. This engine reads the scales of tokens where they lie, and packs nothing.

    Args:
        raw_scales: scales of the tokens in any carrier (`sonicmoe.fleet.carrier`), `[N, words]`.
        cols: columns of the tokens, H.
        prepared: what is to be prepared of the up-projection's outputs; nothing is.

    Raises:
        ShapeError: the scales do not fit N tokens of `cols` columns; and the errors of
            `deepep_topk_to_sonic_metadata`.
    """
    require_framework_tensor(raw_scales, "raw_scales")
    found = tuple(int(size) for size in raw_scales.shape)
    tokens, groups = int(dispatched_indices.shape[0]), -(-int(cols) // GROUP_COLUMNS)
    words = -(-groups // GROUPS_PER_WORD)
    fits = len(found) == 2 and found[0] == tokens and found[1] in (groups, words, 1)
    needed = f"{(tokens, groups)}, or {(tokens, words)} packed words"
    need_shape(fits, "raw_scales", raw_scales, needed)
    routed = dispatched_indices, dispatched_probs, tokens_per_expert, E
    return (*deepep_topk_to_sonic_metadata(*routed, device, block), None)


def differentiable_router_scores(
    dispatched_probs: Tensor,
    dispatched_indices: Tensor,
    naept: Tensor,
    TK: int,
    TK_padded: int,
    E: int,
    score_src_idx: Tensor | None = None,
) -> Tensor:
    """The metadata's scores, fp32 `[TK_padded]`, as a function of `dispatched_probs` that autograd
    knows; zeros from TK on.

    Args:
        dispatched_probs, dispatched_indices, E: as for `deepep_topk_to_sonic_metadata`.
        naept: unused; the positions follow from the indices.
        TK, TK_padded: true and all rows.
        score_src_idx: int32 `[TK]`, the metadata's last element; None: found from the indices.

    Raises:
        ShapeError: TK is not the number of positions; and the errors of
            `deepep_topk_to_sonic_metadata`.
    """
    check_indices_and_probs(dispatched_indices, dispatched_probs, E)
    if score_src_idx is None:
        with plain_ops():
            ids = dispatched_indices.detach().to(torch.int64)
            score_src_idx = _positions(ids, is_here(ids, E), E)
    # A wrong TK would shift every score behind it, without an error.
    found = int(score_src_idx.shape[0])
    needed = f"{found}, the slots with an expert, and not less"
    words = f"TK is {TK} and TK_padded {TK_padded}; needed: {needed}"
    expect(found == TK <= TK_padded, ShapeError, words)
    padding = torch.zeros([TK_padded - TK], dtype=torch.float32, device=dispatched_probs.device)
    if TK == 0:
        return padding
    scores = dispatched_probs.reshape([-1]).index_select(0, score_src_idx.to(torch.int64))
    return torch.cat([scores, padding]) if TK_padded > TK else scores


def scatter_router_scores_i32(scores: Tensor, idx: Tensor, n_total: int) -> Tensor:
    """`[n_total]` with `scores[i]` at `idx[i]` and zeros elsewhere: gradients of scores by position
    (`[TKp]`, or `[TK]`), brought to flat slots. `idx` is the metadata's score_src, int32 `[TK]`.

    Raises:
        ShapeError: there are fewer scores than indices.
    """
    count, there = int(idx.shape[0]), int(scores.shape[0])
    words = f"scores has {there} elements for {count} indices; needed: at least as many"
    expect(there >= count, ShapeError, words)
    with plain_ops():
        out = torch.zeros([n_total], dtype=scores.dtype, device=scores.device)
        if count:
            out[idx.to(torch.int64)] = scores.detach()[:count]
        return out


def _routing(indices: Tensor, probs: Tensor, num_experts: int, block: int) -> RoutingMetadata:
    if block % ROW_ALIGNMENT == 0:
        return build_routing(indices, probs, num_experts, alignment=block)
    # The kernels pad to whole tiles. No engine reads rows in smaller blocks.
    return exact_routing(indices.contiguous(), probs.contiguous(), num_experts, block)


def _as_tuple(routing: RoutingMetadata, probs: Tensor, count: int) -> tuple[Any, ...]:
    """The elements from the metadata of this package; `count` is TK."""
    tokens, topk, device = routing.num_tokens, routing.topk, routing.slot_row.device
    offsets = routing.padded_offsets.to(torch.int32)
    # Behind them lie rows of the worst case, which a GPU has to assume.
    num_rows = int(offsets[-1])
    here = routing.slot_row >= 0
    # Paddle sums no tensor without elements.
    per_token = here.to(torch.int32).sum(1) if tokens * topk else _int32([tokens], device)
    first = torch.cat([_int32([1], device), torch.cumsum(per_token, 0).to(torch.int32)])
    # The contract has no score_src where there is no position.
    if count == 0:
        nothing = _int32([0], device)
        no_score = torch.zeros([0], dtype=torch.float32, device=device)
        return offsets, nothing, nothing, nothing, first, no_score, 0, 0, tokens, None
    # The rows of one token are in the order of its experts.
    source = _positions(routing.slot_row, here, routing.num_rows)
    row = routing.slot_row.reshape([-1])[source]
    is_padding = routing.row_token[:num_rows] < 0
    # Numbers the padding rows. True rows are overwritten.
    position = count + torch.cumsum(is_padding.to(torch.int64), 0) - 1
    position[row] = torch.arange(count, dtype=torch.int64, device=device)
    token = routing.row_token[:num_rows]
    scores = torch.zeros([num_rows], dtype=torch.float32, device=device)
    scores[:count] = probs.reshape([-1])[source]
    return (
        offsets,
        torch.where(is_padding, torch.zeros_like(token), token),
        position.to(torch.int32),
        row.to(torch.int32),
        first,
        scores,
        num_rows,
        num_rows - count,
        tokens,
        source.to(torch.int32),
    )


def _positions(keys: Tensor, here: Tensor, above: int) -> Tensor:
    """int64 `[TK]`: flat slots of the slots that are `here`, token after token and by ascending key
    inside a token. `above` is more than every key.
    """
    tokens, topk = (int(size) for size in keys.shape)
    if tokens * topk == 0:
        return torch.zeros([0], dtype=torch.int64, device=keys.device)
    # Slots without an expert sort behind all others, and are left out by `here` below.
    order = torch.argsort(torch.where(here, keys, torch.full_like(keys, above)), dim=1, stable=True)
    slots = order + topk * torch.arange(tokens, dtype=torch.int64, device=keys.device).unsqueeze(1)
    slots = slots.reshape([-1])
    return slots[here.reshape([-1])[slots]]


def _int32(shape: list[int], device: Any) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


@contextmanager
def enable_fp8(enable: bool = True) -> Iterator[None]:
    """FP8 on or off for everything inside the block that was not given a configuration."""
    around = active_config()
    found = around.resolve().fp8_mode
    mode = ("perf" if found == "off" else found) if enable else "off"
    with dataclasses.replace(around, fp8_mode=mode).activate():
        yield


class _InFleetsCopyAlone:
    """A name that can be bound and not used: an autograd function of one projection, whose `apply`
    raises, or a function.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise EngineUnavailableError(
            f"{self._name} is a part of PaddleFleet's in-tree copy of run_sonic_moe, and this "
            "engine computes both projections in one call: call "
            "paddlefleet_ops.sonicmoe.run_sonic_moe"
        )

    __call__ = apply


UpProjection = _InFleetsCopyAlone("_UpProjection")
DownProjection = _InFleetsCopyAlone("_DownProjection")
attach_preallocated_gated_outputs = _InFleetsCopyAlone("attach_preallocated_gated_outputs")
