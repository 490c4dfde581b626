"""`run_sonic_moe`: the call that PaddleFleet makes for the experts of every micro-batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..engine.tokens import TOKEN_DTYPES
from ..enums import ActivationType
from ..errors import ConfigError, DTypeError, RoutingError, ShapeError, expect
from ..interop import (
    IS_PADDLE,
    dtype_name,
    grad_enabled,
    require_framework_tensor,
    require_same_device,
    requires_grad,
)
from ..node.mlp_node import SonicMoEMlpNode
from ..quant.tokens import is_fp8
from ..refusals import need_dtype, need_shape, need_type
from ..routing.validation import INDEX_DTYPES
from ..weights.copies import WeightCopies
from .carrier import tokens_from_carrier
from .combine_grad import CombineGradient, combine_gradient
from .configuration import FP8Config
from .layer import layer_of
from .weight_copies import copies_of, release_forward_copies

Tensor = torch.Tensor


def run_sonic_moe(
    hidden_states: Tensor,
    topk_indices: Tensor,
    topk_scores: Tensor,
    K: int,
    E: int,
    w1: Tensor,
    w2: Tensor,
    fp8: bool = False,
    tokens_per_expert: Any = None,
    fp8_scale: Tensor | None = None,
    fp8_combine_grad_handle: Any = None,
    fp8_config: FP8Config | None = None,
    release_fp8_weights: bool = False,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    sync_free_sizing: bool = False,
) -> Tensor:
    """`out[t] = sum_k topk_scores[t,k] * expert_{topk_indices[t,k]}(hidden_states[t])` over the
    slots with a local expert.

    Weight gradients are added to fp32 `main_grad` of `w1` and `w2` by each backward, or written
    where `overwrite_main_grad` of the weight is true, in whichever layout it has
    (`weights.stacked`); without that attribute they go through autograd to `.grad`.

    Args:
        hidden_states: bf16 `[T, H]`, or e4m3 codes with `fp8_scale`; T may be 0. Under Paddle its
            gradient is bf16 in both cases: e4m3 `hidden_states` must come from a PyLayer that takes
            that (`ctx.set_grad_in_dtype_consistent(False)`). PyTorch has no such gradient, so there
            e4m3 `hidden_states` must not want one.
        topk_indices: int32 or int64 `[T, K]`, local expert ids; those outside 0..E-1, as -1, are no
            slot.
        topk_scores: fp32 `[T, K]`, or bf16, which is converted. Its gradient is exactly 0 where
            there is no slot.
        K, E: slots of a token, and local experts.
        w1, w2: `[E, 2I, H]` (gate and up rows in turns) and `[E, H, I]`, or `[E, H, 2I]` (gate half
            first) and `[E, I, H]`. Their shapes tell which, anew at each call. With `fp8`, copies
            that hang on them are read in their place (`fleet.weight_copies`), and their memory may
            have been freed.
        fp8: whether operands are quantised.
        tokens_per_expert: E counts as a list, or a tensor, or None. One on a GPU is never read.
        fp8_scale: scales of e4m3 tokens in any form of `fleet.carrier`.
        fp8_combine_grad_handle: where the combine's backward leaves the gradient of the output.
        fp8_config: settings of the layer; None: the configuration in force.
        release_fp8_weights: free the FP8 copies that forwards alone read, after this one
            (`fleet.weight_copies`).
        activation_type: a gated member of `ActivationType`, its value, or a description of SiTU-GLU.
        sync_free_sizing: changes nothing: no size here waits for the device.

    Returns:
        bf16 `[T, H]`; a token without a slot gets exact zeros.

    Raises:
        ShapeError, DTypeError, RoutingError, ConfigError, DeviceError, FrameworkError: naming the
            argument, what came and what is needed.
        LayoutError, StaleWeightsError: w1 or w2 holds no memory, and has no copies, or old ones.
        OutOfMemoryError: nothing has changed.
    """
    try:
        experts = ExpertsOfACall(
            *(K, E, w1, w2, fp8, fp8_combine_grad_handle, fp8_config, activation_type)
        )
        routed = hidden_states, topk_indices, topk_scores
        given = experts.arguments(*routed, tokens_per_expert, fp8_scale)
        out = given.node(*given[1:])
    except Exception:
        # Whatever was called has its own names for the arguments. What it refuses is looked for
        # only then: under Paddle a look at every dtype takes as long as several launches.
        check_arguments(hidden_states, topk_indices, topk_scores, fp8_scale)
        raise
    if fp8 and release_fp8_weights:
        release_forward_copies(w1, w2, given.copies)
    return out


class NodeArguments(NamedTuple):
    """A call of Fleet's as one of the node: the node, and its arguments in their order."""

    node: SonicMoEMlpNode
    x: Tensor
    tokens_per_expert: Any
    indices: Tensor
    scores: Tensor
    x_scale: Tensor | None
    dx_to: Tensor | None
    source: CombineGradient | None
    copies: WeightCopies | None


class ExpertsOfACall(NamedTuple):
    """The arguments of `run_sonic_moe` that say which experts these are, and how they compute."""

    topk: int
    experts: int
    w1: Tensor
    w2: Tensor
    fp8: bool
    handle: Any
    config: FP8Config | None
    activation: ActivationType | str

    def arguments(
        self, x: Tensor, indices: Tensor, scores: Tensor, tokens_per_expert: Any, scale: Any
    ) -> NodeArguments:
        """The node and its arguments for these tokens; errors in the words of whoever refuses."""
        layer = layer_of(self.w1, self.w2, int(x.shape[1]))
        # The node cannot check these two: it is told neither K nor E.
        fits = int(indices.shape[-1]) == self.topk
        need_shape(fits, "topk_indices", indices, f"[T, K] with K = {self.topk}")
        held = f"w1 and w2 hold {layer.experts} experts"
        needed = "as many local experts as weights, so no redundant slots as MoonEP has"
        words = f"E is {self.experts}, and {held}; needed: {needed}"
        expect(self.experts == layer.experts, RoutingError, words)
        config = FP8Config() if self.config is None else self.config
        needed = "what _refresh_fp8_config() returns, or None"
        need_type("fp8_config", config, FP8Config, needed, ConfigError)
        node = layer.node(config.node_config(fp8=self.fp8), *config.activation(self.activation))
        x, x_scale, dx_to = _tokens_of(x, scale)
        source = combine_gradient(self.handle)
        copies = copies_of(self.w1, self.w2) if self.fp8 else None
        if scores.dtype == torch.bfloat16:  # as some of Fleet's routers leave them
            scores = scores.to(torch.float32)
        routing = (tokens_per_expert, indices, scores)
        return NodeArguments(node, x, *routing, x_scale, dx_to, source, copies)


def check_arguments(hidden_states: Any, indices: Any, scores: Any, fp8_scale: Any) -> None:
    """Raise in Fleet's names what is wrong with these arguments, if anything is."""
    _check_tokens(hidden_states, fp8_scale)
    tokens = int(hidden_states.shape[0])
    for name, value in (("topk_indices", indices), ("topk_scores", scores)):
        require_framework_tensor(value, name)
        fits = len(value.shape) == 2 and int(value.shape[0]) == tokens
        need_shape(fits, name, value, f"[T, K] with T = {tokens}, the rows of hidden_states")
    shapes = tuple(scores.shape), tuple(indices.shape)
    words = f"topk_scores has shape {shapes[0]} and topk_indices {shapes[1]}; needed: one shape"
    expect(shapes[0] == shapes[1], ShapeError, words)
    need_dtype("topk_indices", indices, *INDEX_DTYPES)
    need_dtype("topk_scores", scores, torch.float32, torch.bfloat16)
    given = ("hidden_states", hidden_states), ("topk_indices", indices), ("topk_scores", scores)
    require_same_device(given)


def _check_tokens(hidden_states: Any, fp8_scale: Any) -> None:
    require_framework_tensor(hidden_states, "hidden_states")
    need_shape(len(hidden_states.shape) == 2, "hidden_states", hidden_states, "[T, H]")
    if is_fp8(hidden_states) is (fp8_scale is not None):
        if fp8_scale is None:
            need_dtype("hidden_states", hidden_states, *TOKEN_DTYPES)
        return
    found = dtype_name(hidden_states.dtype)
    if fp8_scale is None:
        needed = "the scales of these codes as fp8_scale, or bfloat16"
        raise DTypeError(f"hidden_states is {found} and fp8_scale is None; needed: {needed}")
    needed = "float8_e4m3fn, or no fp8_scale"
    raise DTypeError(f"fp8_scale came with hidden_states in {found}; needed: {needed}")


def _tokens_of(
    hidden_states: Tensor, fp8_scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`(x, x_scale, dx_to)` of the node."""
    if fp8_scale is None:
        return hidden_states, None, None
    if not IS_PADDLE and grad_enabled() and requires_grad(hidden_states):
        raise DTypeError(
            f"hidden_states in {dtype_name(hidden_states.dtype)} wants a gradient, and PyTorch "
            "would cast it to that; needed: hidden_states.detach(), or a node with dx_to"
        )
    tokens, moved = tokens_from_carrier(hidden_states, fp8_scale)
    # Codes that nothing has moved stay the caller's tensor, whose writes the node sees.
    codes = tokens.codes if moved or not hidden_states.is_contiguous() else hidden_states
    # Under Paddle the gradient goes to the codes themselves, in bf16: their PyLayer takes that.
    return codes, tokens.scale_inv, hidden_states if IS_PADDLE else None
