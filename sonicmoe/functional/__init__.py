"""The PyTorch face, functional half: upstream SonicMoE's signatures over the engine seam. Weights
are `w1 [N1, H, E]`, `w2 [H, I, E]`.

Which expert ids drop their slot, and what a dropped slot means: docs/design.md, "Routing contract".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from ..config import active_config
from ..enums import ActivationType, layer_parameters, member_of
from ..errors import ConfigError, EngineUnavailableError, ShapeError, expect
from ..interop import require_framework_tensor
from ..layouts import Codes, GateUp
from ..observe import TOPK, TRIPLES
from ..refusals import need_shape
from ..weights.stacked_cache import Weights  # refuses Paddle, so before all of the PyTorch face
from .autograd import expert_mlp
from .border import (
    check_router,
    check_router_dtype,
    check_stacks,
    check_switch,
    check_tokens,
    check_triples,
    gate_and_up,
    layout_of,
    permuted,
)
from .frozen import as_stored, freeze_weights
from .triples import count_cumsum, frequency_of, triples_to_topk

Tensor = torch.Tensor

__all__ = [
    "FP8BlockwiseTensor",
    "count_cumsum",
    "enable_quack_gemm",
    "freeze_weights",
    "moe_TC_softmax_topk_layer",
    "moe_TC_softmax_topk_layer_fp8",
    "moe_general_routing_inputs",
    "moe_general_routing_inputs_fp8",
]


@contextmanager
def enable_quack_gemm(enable: bool = True) -> Iterator[None]:
    """Accepted for source compatibility: the engine is chosen by `SonicMoEConfig.engine`, not by
    this switch.
    """
    with dataclasses.replace(active_config(), use_quack_gemm=enable).activate():
        yield


def moe_TC_softmax_topk_layer(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor | tuple[Tensor, Tensor],
    b1: Tensor | None,
    w2: Tensor | Codes,
    b2: Tensor | None,
    K: int,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    concat_layout: bool = False,
    *,
    use_fp8: bool | None = None,
    activation_parameters: Mapping[str, float | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole token-choice MoE layer: router logits, top-k, softmax, experts, weighted sum.

    Args:
        x: `[T, H]`.
        router_w: `[E, H]`.
        w1, w2: `[N1, H, E]`, `[H, I, E]` (permuted views of `[E, N1, H]`, `[E, H, I]`); N1 = 2I for
            gated activations. Or w1 is `(gate, up)`, two tensors `[I, H, E]` of one dtype, each of
            which gets a gradient of its own. On Hopper engine `hopper` quantises from both where
            they lie, and `bf16` reads them there where I is a multiple of 64 and strides are equal.
            Or both are codes of `freeze_weights`, which never train.
        b1, b2: `[E, N1]`, `[E, H]`, both or neither.
        K: experts per token.
        stream_id: accepted for source compatibility; work goes to the caller's current stream.
        is_inference_mode_enabled: keep nothing for a backward.
        is_softmax_over_topk: the softmax is over the K chosen logits, so a token's probabilities
            sum to 1; False: over all E, so they sum to less.
        norm_topk_probs: after a softmax over all E, divide a token's K probabilities by their sum.
        concat_layout: rows of w1 and b1 are [gate; up] halves instead of interleaved pairs. Where
            w1 is two tensors, b1 is always in halves.
        use_fp8: True or False overrides the configuration's FP8 mode.
        activation_parameters: numbers of the activation by name, as of `MoE`.

    Returns:
        `(out [T, H], router_logits [T, E], expert_frequency int32 [E])`.

    Raises:
        ShapeError: K is no integer in [1, E], or router, weights and tokens do not fit together.
        DTypeError: x and router_w differ in dtype outside autocast, or gate and up do.
        ConfigError: `activation_type`, `use_fp8` or an activation parameter has an unknown value, or
            w1 is two tensors and the activation has no gate.
        TypeError: x, router_w, w1 or w2 is no tensor.
    """
    given = gate_and_up(w1, "[I, H, E]")
    check_tokens(x)
    check_router(router_w, x)
    check_stacks((given, w2, b1, b2), int(router_w.shape[0]), "the rows of router_w")
    check_router_dtype(x, router_w)
    activation = member_of(ActivationType, activation_type, "activation_type")
    weights, layout = as_stored(given, w2, b1, b2, layout_of(activation, concat_layout, given))
    # An operation of the caller's: autograd, autocast and hooks see it as any other.
    logits = torch.nn.functional.linear(x, router_w)
    out, counts = softmax_topk_layer(
        x,
        logits,
        weights,
        K,
        activation,
        softmax_over_topk=is_softmax_over_topk,
        norm_topk_probs=norm_topk_probs,
        parameters=layer_parameters(activation, activation_parameters),
        layout=layout,
        inference=is_inference_mode_enabled,
        use_fp8=use_fp8,
        face=TOPK,
    )
    return out, logits, counts


def softmax_topk_layer(
    x: Tensor,
    logits: Tensor,
    weights: Weights,
    K: int,
    activation: ActivationType,
    *,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`(out, expert_frequency)` of `moe_TC_softmax_topk_layer`, from the router's logits `[T, E]`, on
    `(w1, w2, b1, b2)` as they lie in memory, and on tokens `[..., H]`, whose shape the output has;
    `options` of `expert_mlp`.
    """
    indices, probs = choose(logits.to(torch.float32), K, softmax_over_topk, norm_topk_probs)
    out = expert_mlp(autocast(x), indices, probs, *weights, activation, **options)
    return out, frequency_of(indices.reshape(-1), int(logits.shape[-1]))


def choose(
    logits: Tensor, K: int, softmax_over_topk: bool, norm_topk_probs: bool
) -> tuple[Tensor, Tensor]:
    """fp32 logits `[T, E]` -> the chosen experts and their probabilities, both `[T, K]`.

    Raises:
        ShapeError: K is no integer in [1, E].
        ConfigError: one of the other two is no bool.
    """
    experts = int(logits.shape[-1])
    expect(
        isinstance(K, Integral) and not isinstance(K, bool) and 1 <= K <= experts,
        ShapeError,
        f"K is {K!r}; needed: 1 to {experts}, the number of experts",
    )
    check_switch("is_softmax_over_topk", softmax_over_topk)
    check_switch("norm_topk_probs", norm_topk_probs)
    # A softmax keeps the order, so whatever it is over the experts are those of the K largest
    # logits.
    chosen, indices = torch.topk(logits, K, dim=-1)
    if softmax_over_topk:
        return indices, torch.softmax(chosen, dim=-1)
    # The softmax over all E, computed for the chosen ones alone.
    probs = torch.exp(chosen - torch.logsumexp(logits, dim=-1, keepdim=True))
    return indices, probs / probs.sum(-1, keepdim=True) if norm_topk_probs else probs


def moe_general_routing_inputs(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor | tuple[Tensor, Tensor],
    b1: Tensor | None,
    w2: Tensor | Codes,
    b2: Tensor | None,
    E: int | None = None,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
    *,
    use_fp8: bool | None = None,
    max_experts_per_token: int | None = None,
    activation_parameters: Mapping[str, float | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts on any routing: N (token, expert, score) triples, a token may appear any number of
    times.

    Args:
        x: `[T, H]`.
        router_scores: `[N]`, any floating dtype; receives a gradient.
        token_indices: int `[N]`, ascending.
        expert_indices: int `[N]`, expert ids (docs/design.md, "Routing contract").
        E: number of experts; must match the weights when given.
        w1, b1, w2, b2, stream_id, activation_type, is_inference_mode_enabled, concat_layout,
            use_fp8, activation_parameters: as in `moe_TC_softmax_topk_layer`.
        max_experts_per_token: the most often that any token appears. Given, the call waits for no
            GPU, can be captured in a CUDA graph and compiled into a full graph; without it, the
            number is read off the device.

    Returns:
        `(out [T, H], expert_frequency int32 [E])`.

    Raises:
        ShapeError: x is no matrix, the triples differ in length, or E or the tokens do not fit the
            weights.
        DTypeError: scores are no floating type, indices are neither int32 nor int64, or gate and up
            differ in dtype.
        TypeError: a tensor is none.
        RoutingError: `token_indices` is not ascending, names no row of x, or names one more than
            `max_experts_per_token` times. On a GPU with `max_experts_per_token` (unless
            `validate_dispatch` is on), and in a compiled graph, a failed assertion says so.
        ConfigError: `activation_type`, `use_fp8` or an activation parameter has an unknown value, or
            w1 is two tensors and the activation has no gate.
    """
    given = gate_and_up(w1, "[I, H, E]")
    check_tokens(x)
    check_stacks((given, w2, b1, b2), E, "E")
    check_triples(x, router_scores, token_indices, expert_indices)
    indices, probs = triples_to_topk(
        router_scores, token_indices, expert_indices, int(x.shape[0]), max_experts_per_token
    )
    activation = member_of(ActivationType, activation_type, "activation_type")
    weights, layout = as_stored(given, w2, b1, b2, layout_of(activation, concat_layout, given))
    out = expert_mlp(
        autocast(x),
        indices,
        probs,
        *weights,
        activation,
        parameters=layer_parameters(activation, activation_parameters),
        layout=layout,
        inference=is_inference_mode_enabled,
        use_fp8=use_fp8,
        face=TRIPLES,
    )
    return out, frequency_of(expert_indices, int(weights[1].shape[0]))


class FP8BlockwiseTensor:
    """Upstream's weights and tokens that were quantised before the call; here there are none."""

    @classmethod
    def to_weights(cls, x: Tensor) -> Any:
        """Raises EngineUnavailableError, as its other constructors do."""
        raise EngineUnavailableError(
            "FP8BlockwiseTensor is not there: pass weights and tokens as they are. The engine "
            "quantises tokens with the scales that its GEMMs read, and FP8 copies of weights serve "
            "every call until the weights change"
        )

    to_activations = from_float = to_weights


def moe_TC_softmax_topk_layer_fp8(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor | tuple[Tensor, Tensor],
    w2: Tensor,
    K: int,
    activation_type: ActivationType | str,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    is_inference_mode: bool = False,
    x_fp8: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_TC_softmax_topk_layer` with `use_fp8=True` on weights `w1 [E, N1, H]`, `w2 [E, H, I]`,
    which is how upstream's function of this name has them; a w1 of two tensors is `[E, I, H]` each.

    Raises:
        ConfigError: `x_fp8`, tokens that were quantised before the call, is not None.
    """
    return moe_TC_softmax_topk_layer(
        x,
        router_w,
        *_from_native(w1, w2, x_fp8),
        K,
        None,
        activation_type,
        is_inference_mode,
        is_softmax_over_topk,
        norm_topk_probs,
        use_fp8=True,
    )


def moe_general_routing_inputs_fp8(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor | tuple[Tensor, Tensor],
    w2: Tensor,
    E: int,
    activation_type: ActivationType | str,
    is_inference_mode: bool = False,
    x_fp8: None = None,
) -> tuple[Tensor, Tensor]:
    """`moe_general_routing_inputs` with `use_fp8=True`; weights and `x_fp8` as in
    `moe_TC_softmax_topk_layer_fp8`.
    """
    return moe_general_routing_inputs(
        x,
        router_scores,
        token_indices,
        expert_indices,
        *_from_native(w1, w2, x_fp8),
        E,
        None,
        activation_type,
        is_inference_mode,
        use_fp8=True,
    )


def _from_native(w1: Any, w2: Tensor, x_fp8: object) -> tuple[Any, None, Tensor, None]:
    """Native weights as `(w1, b1, w2, b2)` of the functions above, by views."""
    words = f"x_fp8 is {type(x_fp8).__name__}; needed: None, because the engine quantises x itself"
    expect(x_fp8 is None, ConfigError, words)
    given = gate_and_up(w1, "[E, I, H]")
    of_w1 = () if isinstance(given, GateUp) else (("w1", given, "[E, N1, H]"),)
    for name, weight, axes in (*of_w1, ("w2", w2, "[E, H, I]")):
        require_framework_tensor(weight, name)
        need_shape(len(weight.shape) == 3, name, weight, axes)
    return permuted(given, 1, 2, 0), None, w2.permute(1, 2, 0), None


def autocast(x: Tensor) -> Tensor:
    """Tokens in the autocast dtype where autocast lowers precision; autocast to fp32 leaves them as
    they are, like upstream.
    """
    # The engine is one operation to autograd, and autocast does not look inside it. So the tokens
    # are cast here, as autocast casts the arguments of a matrix product.
    device = x.device.type
    # It knows no meta device, which the engine refuses by name.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    dtype = torch.get_autocast_dtype(device)
    return x if dtype == torch.float32 else x.to(dtype)
