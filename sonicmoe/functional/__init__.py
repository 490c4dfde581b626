"""The PyTorch face, functional half: upstream SonicMoE's signatures over the engine seam. Weights are `w1 [N1, H, E]`, `w2 [H, I, E]`.

Sentinels: an expert id of -1, or >= E, drops its slot at no cost: no output, exactly zero gradient (docs/design.md, "Routing contract").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import layouts
from ..config import active_config, current_config
from ..enums import ActivationType, is_glu
from ..errors import DTypeError, RoutingError, ShapeError, expect
from ..interop import dtype_name, is_cuda
from .autograd import WeightCache, expert_mlp

Tensor = torch.Tensor

__all__ = ["count_cumsum", "enable_quack_gemm", "moe_TC_softmax_topk_layer", "moe_general_routing_inputs"]


@contextmanager
def enable_quack_gemm(enable: bool = True) -> Iterator[None]:
    """Accepted for source compatibility: the engine is chosen by `SonicMoEConfig.engine`, not by this switch."""
    with dataclasses.replace(active_config(), use_quack_gemm=enable).activate():
        yield


def count_cumsum(x: Tensor, E: int, do_cumsum: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Occurrences of each id in `[0, E)` and their inclusive prefix sum.

    Args:
        x: int32 or int64 `[N]`; ids outside `[0, E)` are not counted.
        E: number of experts.
        do_cumsum: also return the prefix sum.

    Returns:
        int32 `[E]` counts, or `(counts, inclusive prefix sum)`.
    """
    expect(len(x.shape) == 1, ShapeError, f"x has shape {tuple(x.shape)}; needed: one axis")
    expect(x.dtype in (torch.int32, torch.int64), DTypeError, f"x is {dtype_name(x.dtype)}; needed: int32 or int64")
    ids = x.to(torch.int64)
    group = torch.where((ids >= 0) & (ids < E), ids, torch.full_like(ids, E))
    counts = torch.bincount(group, minlength=E + 1)[:E].to(torch.int32)
    return (counts, torch.cumsum(counts, 0, dtype=torch.int32)) if do_cumsum else counts


def moe_TC_softmax_topk_layer(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    K: int,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
    *,
    weight_cache: WeightCache | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole token-choice MoE layer: router logits, top-k, softmax over the chosen, experts, weighted sum.

    Args:
        x: `[T, H]`.
        router_w: `[E, H]`.
        w1, w2: `[N1, H, E]`, `[H, I, E]` (permuted views of `[E, N1, H]`, `[E, H, I]`); N1 = 2I for gated activations.
        b1, b2: `[E, N1]`, `[E, H]`, both or neither.
        K: experts per token.
        stream_id: accepted for source compatibility; work goes to the caller's current stream.
        concat_layout: w1 rows are [gate; up] halves instead of interleaved pairs.
        weight_cache: keeps prepared weights between calls; `MoE` passes its own.

    Returns:
        `(out [T, H], router_logits [T, E], expert_frequency int32 [E])`.

    Raises:
        ShapeError: K is not in [1, E], or router, weights and tokens do not fit together.
    """
    experts = int(router_w.shape[0])
    _check_weights(w1, w2, experts, "the rows of router_w")
    expect(1 <= K <= experts, ShapeError, f"K is {K}; needed: 1 to {experts}, the number of experts")
    logits = torch.nn.functional.linear(x, router_w)
    chosen, indices = torch.topk(logits.to(torch.float32), K, dim=-1)
    probs = torch.softmax(chosen, dim=-1)
    out = _run_experts(
        x, indices, probs, w1, b1, w2, b2, activation_type, is_inference_mode_enabled, concat_layout, weight_cache
    )
    counts = count_cumsum(indices.reshape(-1), experts, do_cumsum=False)
    assert isinstance(counts, torch.Tensor)
    return out, logits, counts


def moe_general_routing_inputs(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int | None = None,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Experts on any routing: N (token, expert, score) triples, a token may appear any number of times.

    Args:
        x: `[T, H]`.
        router_scores: `[N]`, any floating dtype; receives a gradient.
        token_indices: int `[N]`, ascending.
        expert_indices: int `[N]`; -1 and >= E drop the triple.
        E: number of experts; must match the weights when given.
        w1, b1, w2, b2, stream_id, activation_type, is_inference_mode_enabled, concat_layout: as in `moe_TC_softmax_topk_layer`.

    Returns:
        `(out [T, H], expert_frequency int32 [E])`.

    Raises:
        ShapeError: the triples differ in length, or E or the tokens do not fit the weights.
        DTypeError: scores are no floating type, or indices are neither int32 nor int64.
        RoutingError: `token_indices` is not ascending (checked on the host, or with `validate_dispatch`), or names no row of x.
    """
    experts = int(w2.shape[-1])
    _check_weights(w1, w2, experts if E is None else E, "the last axis of w2" if E is None else "E")
    indices, probs = _triples_to_topk(router_scores, token_indices, expert_indices, int(x.shape[0]))
    out = _run_experts(
        x, indices, probs, w1, b1, w2, b2, activation_type, is_inference_mode_enabled, concat_layout, None
    )
    counts = count_cumsum(expert_indices, experts, do_cumsum=False)
    assert isinstance(counts, torch.Tensor)
    return out, counts


def _triples_to_topk(scores: Tensor, tokens: Tensor, experts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Sorted triples -> `[T, Kmax]` indices (-1 filled) and fp32 probabilities, differentiable in the scores."""
    _check_triples(scores, tokens, experts)
    tokens = tokens.to(torch.int64)
    if current_config().validate_dispatch or not is_cuda(tokens):
        expect(
            not bool((tokens[1:] < tokens[:-1]).any()),
            RoutingError,
            "token_indices is not ascending; sort the triples by token",
        )
    # A row outside x counts in an extra bin, so one look at one number finds it.
    inside = (tokens >= 0) & (tokens < num_tokens)
    counted = torch.bincount(torch.where(inside, tokens, torch.full_like(tokens, num_tokens)), minlength=num_tokens + 1)
    strays = int(counted[num_tokens])
    expect(strays == 0, RoutingError, f"token_indices holds {strays} ids outside [0, {num_tokens}), the rows of x")
    per_token = counted[:num_tokens]
    topk = max(1, int(per_token.max())) if num_tokens else 1
    first = torch.cumsum(per_token, 0) - per_token
    slot = tokens * topk + torch.arange(int(tokens.shape[0]), device=tokens.device) - first[tokens]
    indices = torch.full((num_tokens * topk,), -1, dtype=torch.int64, device=tokens.device)
    indices[slot] = experts.to(torch.int64)
    probs = torch.zeros(num_tokens * topk, dtype=torch.float32, device=tokens.device).index_put(
        (slot,), scores.to(torch.float32)
    )
    return indices.reshape(num_tokens, topk), probs.reshape(num_tokens, topk)


def _check_triples(scores: Tensor, tokens: Tensor, experts: Tensor) -> None:
    shape = tuple(scores.shape)
    expect(len(shape) == 1, ShapeError, f"router_scores has shape {shape}; needed: one axis")
    expect(
        scores.is_floating_point(), DTypeError, f"router_scores is {dtype_name(scores.dtype)}; needed: a floating type"
    )
    for name, ids in (("token_indices", tokens), ("expert_indices", experts)):
        expect(tuple(ids.shape) == shape, ShapeError, f"{name} has shape {tuple(ids.shape)}; router_scores {shape}")
        expect(
            ids.dtype in (torch.int32, torch.int64),
            DTypeError,
            f"{name} is {dtype_name(ids.dtype)}; needed: int32 or int64",
        )


def _check_weights(w1: Tensor, w2: Tensor, experts: int, source: str) -> None:
    """Three axes, and as many experts on the last as `source` says; what else must fit, the engine checks."""
    for name, weight, axes in (("w1", w1, "[N1, H, E]"), ("w2", w2, "[H, I, E]")):
        shape = tuple(weight.shape)
        expect(len(shape) == 3, ShapeError, f"{name} has shape {shape}; needed: {axes}")
        expect(
            shape[2] == experts, ShapeError, f"{name} {axes} has shape {shape}; needed: {experts} experts ({source})"
        )


def _run_experts(
    x: Tensor,
    indices: Tensor,
    probs: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation_type: ActivationType | str,
    inference: bool,
    concat_layout: bool,
    weight_cache: WeightCache | None,
) -> Tensor:
    activation = ActivationType(activation_type)
    native_w1, native_w2 = w1.permute(2, 0, 1), w2.permute(2, 0, 1)
    if concat_layout and is_glu(activation):
        native_w1 = layouts.interleave_gate_up(native_w1)
        b1 = None if b1 is None else layouts.interleave_bias(b1)
    x = _autocast(x)
    return expert_mlp(
        x, indices, probs, native_w1, native_w2, b1, b2, activation, inference=inference, weight_cache=weight_cache
    )


def _autocast(x: Tensor) -> Tensor:
    """Tokens in the autocast dtype where autocast is on."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
