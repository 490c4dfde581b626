"""Upstream SonicMoE's functions for expert parallelism. A rank gives T tokens, and gets T results.

    tokens of this rank ──dispatch──► experts of this rank ──combine──► tokens of this rank

E experts of the whole group, L = E / W of them on each of W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..autograd import eagerly
from ..distributed_utils import (
    CombineMode,
    DispatchMode,
    NetworkProfiler,
    RuntimeEPConfig,
    clear_ep_cache,
    default_group,
    dispatcher_of,
    world_size,
)
from ..enums import ActivationType, layer_parameters, member_of
from ..ep.interface import check_num_experts
from ..errors import ConfigError, expect
from ..interop import require_framework_tensor, require_same_device
from ..refusals import need_dtype, need_shape
from . import autocast, choose, layout_of
from .autograd import expert_mlp
from .border import (
    check_router,
    check_router_dtype,
    check_switch,
    check_tokens,
    need_values,
)

Tensor = torch.Tensor

__all__ = [
    "CombineMode",
    "DispatchMode",
    "NetworkProfiler",
    "RuntimeEPConfig",
    "clear_ep_cache",
    "moe_ep_TC_softmax_topk_forward",
    "moe_ep_general_routing_forward",
]


@eagerly
def moe_ep_TC_softmax_topk_forward(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    K: int,
    E: int,
    *,
    group: Any = None,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    **options: Any,
) -> Tensor:
    """Router logits, top-k, softmax, and `moe_ep_general_routing_forward`.

    Args:
        x: `[T, H]`, of this rank.
        router_w: `[E, H]`, the same on all ranks. The backward sums its gradient over the group.
        is_softmax_over_topk, norm_topk_probs: as in `moe_TC_softmax_topk_layer`.
        K, E: experts per token; experts of the whole group.
        w1, b1, w2, b2, group, options: as in `moe_ep_general_routing_forward`.

    Returns:
        `[T, H]`.
    """
    group = default_group() if group is None else group
    check_tokens(x)
    check_router(router_w, x)
    check_num_experts(E, world_size(group), "E")
    need_shape(int(router_w.shape[0]) == E, "router_w", router_w, f"[E, H] with E = {E}")
    check_router_dtype(x, router_w)
    shared = router_w if world_size(group) == 1 else _SummedOverRanks.apply(router_w, group)
    logits = torch.nn.functional.linear(x, shared)
    chosen = choose(logits.to(torch.float32), K, is_softmax_over_topk, norm_topk_probs)
    return moe_ep_general_routing_forward(x, *chosen, w1, b1, w2, b2, E, group=group, **options)


@eagerly
def moe_ep_general_routing_forward(
    x: Tensor,
    topk_indices: Tensor,
    topk_scores: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int,
    *,
    group: Any = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
    ep_config: RuntimeEPConfig | None = None,
    redispatch_x_in_backward: bool = False,
    CPU_sync_on_runtime: bool = False,
    layer_id: int | None = None,
    use_fp8: bool | None = None,
    activation_parameters: Mapping[str, float | None] | None = None,
) -> Tensor:
    """Experts that are spread over the ranks of a group, on any routing. All ranks call it, in one
    order, and all run its backward or none.

    Args:
        x: `[T, H]`, of this rank. T may differ between ranks, but not where `ep_config` gathers.
        topk_indices: int `[T, K]`, ids of the whole group (docs/design.md, "Routing contract").
        topk_scores: `[T, K]`, any floating dtype; receives a gradient.
        w1, w2: `[N1, H, L]` and `[L, I, H]`, of this rank's experts, the ids from `rank * L`.
        b1, b2: `[L, N1]`, `[L, H]`, both or neither.
        E: experts of the whole group.
        group: the process group; None: all ranks, or this process alone where there are no others.
        ep_config: W and K, which must be those of the call, and how rows travel (`DispatchMode`).
        redispatch_x_in_backward: must be False, because tokens that arrived are kept for backward.
        CPU_sync_on_runtime: True: the host waits for counts in any mode, so that memory is as
            large as what arrives.
        layer_id: accepted for source compatibility: no layers share a buffer.
        activation_type, is_inference_mode_enabled, concat_layout, use_fp8, activation_parameters:
            as in `moe_TC_softmax_topk_layer`.

    Returns:
        `[T, H]`, the weighted sum over the experts of all ranks.

    Raises:
        RoutingError: E is no multiple of the number of ranks.
        ShapeError: an argument does not fit the others.
        DTypeError: scores are no floating type, or indices are neither int32 nor int64.
        ConfigError: `ep_config` is for another W or K, or an option has an unknown value.
        RankLostError: another rank does not answer.
    """
    _check_routing(x, topk_indices, topk_scores)
    group = default_group() if group is None else group
    ranks, slots = world_size(group), int(topk_indices.shape[1])
    _check_experts(w1, w2, E, ranks)
    for name, bias in (("b1", b1), ("b2", b2)):
        if bias is not None:
            require_framework_tensor(bias, name)
    words = f"redispatch_x_in_backward is {redispatch_x_in_backward!r}; needed: False"
    reason = "because the engine keeps the tokens that arrived"
    expect(redispatch_x_in_backward is False, ConfigError, f"{words}, {reason}")
    check_switch("CPU_sync_on_runtime", CPU_sync_on_runtime)
    activation = member_of(ActivationType, activation_type, "activation_type")
    gathers = False
    if ep_config is not None:
        _check_config(ep_config, ranks, slots)
        gathers = DispatchMode(ep_config.dispatch_mode).gathers and not CPU_sync_on_runtime
    dispatcher = dispatcher_of(E, group, int(x.shape[0]) if gathers else None)
    # Without a backward, and its collectives, of which nothing would arrive.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        scores = topk_scores.to(torch.float32)
        tokens = dispatcher.dispatch(autocast(x), topk_indices, scores)
        out = expert_mlp(
            tokens.x,
            tokens.indices,
            tokens.probs,
            w1.permute(2, 0, 1),
            w2.permute(0, 2, 1),
            b1,
            b2,
            activation,
            parameters=layer_parameters(activation, activation_parameters),
            layout=layout_of(activation, concat_layout),
            inference=is_inference_mode_enabled,
            use_fp8=use_fp8,
        )
        return dispatcher.combine(out, tokens.handle)


def _check_routing(x: Tensor, indices: Tensor, scores: Tensor) -> None:
    check_tokens(x)
    for name, value in (("topk_indices", indices), ("topk_scores", scores)):
        need_values(name, value)
        fits = len(value.shape) == 2 and value.shape[0] == x.shape[0]
        need_shape(fits, name, value, f"[T, K] with T = {int(x.shape[0])}, as x has")
    need_shape(scores.shape == indices.shape, "topk_scores", scores, tuple(indices.shape))
    need_dtype("topk_indices", indices, torch.int64, torch.int32)
    need_dtype("topk_scores", scores, torch.float32, torch.bfloat16, torch.float16)
    require_same_device([("x", x), ("topk_indices", indices), ("topk_scores", scores)])


def _check_experts(w1: Tensor, w2: Tensor, experts: int, ranks: int) -> None:
    # Other sizes are the engine's to check, which knows the activation and the layout.
    check_num_experts(experts, ranks, "E")
    local = experts // ranks
    for name, weight, axis, axes in (("w1", w1, 2, "[N1, H, L]"), ("w2", w2, 0, "[L, I, H]")):
        require_framework_tensor(weight, name)
        fits = len(weight.shape) == 3 and weight.shape[axis] == local
        need_shape(fits, name, weight, f"{axes} with L = E / W = {local}")


def _check_config(config: RuntimeEPConfig, ranks: int, slots: int) -> None:
    words = f"ep_config is {type(config).__name__}; needed: a RuntimeEPConfig"
    expect(isinstance(config, RuntimeEPConfig), ConfigError, words)
    words = f"ep_config has W = {config.W} and K = {config.K}"
    fits = (ranks, slots) == (config.W, config.K)
    expect(fits, ConfigError, f"{words}; needed: {ranks} ranks and {slots} slots of a token")


class _SummedOverRanks(torch.autograd.Function):
    """A weight that all ranks hold alike; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.to(torch.float32, copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None
