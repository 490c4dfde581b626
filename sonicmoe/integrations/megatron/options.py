"""Reads a `TransformerConfig` into the engine's words, or refuses an option of it by the
option's own name. docs/megatron.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.activations import fast_gelu, squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from ...config import SonicMoEConfig
from ...engine.capabilities import lost_on_gpus
from ...engine.settings import EngineSettings, Workload
from ...enums import ActivationParameters, ActivationType, EngineName, FirstBackward
from ...errors import ConfigError, ShapeError, expect

_F = torch.nn.functional
_GATED = (
    (_F.silu, ActivationType.SWIGLU),
    (_F.gelu, ActivationType.GEGLU),
    (fast_gelu, ActivationType.GEGLU_TANH),
    (_F.relu, ActivationType.REGLU),
)
_PLAIN = (
    (_F.silu, ActivationType.SILU),
    (_F.gelu, ActivationType.GELU),
    (fast_gelu, ActivationType.GELU_TANH),
    (_F.relu, ActivationType.RELU),
    (squared_relu, ActivationType.RELU_SQ),
)
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}
# Options of 0.17 and later that reorder or keep what the stock experts hold. Falsy: not asked for.
_UNSERVED = {
    "moe_mlp_glu_interleave_size": "gate rows lie before up rows here; needed: None",
    "moe_single_grouped_weight": "each expert has a weight of its own here; needed: False",
    "moe_single_grouped_bias": "each expert has a bias of its own here; needed: False",
    "moe_paged_stash": "activations are saved by autograd here; needed: False",
    "moe_ncclep_zero_copy": "outputs are in memory of their own here; needed: False",
    "fp4": "no engine has FP4; needed: None",
}


class Sizes(NamedTuple):
    """Of the experts on one rank."""

    experts: int
    hidden: int
    inner: int


def own_config(options: dict[str, Any]) -> SonicMoEConfig:
    """The configuration of the layer, of keyword arguments that are fields of `SonicMoEConfig`.
    ConfigError for an unknown option, or a value that it does not take.
    """
    try:
        # Megatron-Core calls no `step()`, at which the gradients that no backward wrote get zeros.
        config = SonicMoEConfig(**{"first_backward": FirstBackward.ADD, **options})
    except TypeError as error:
        words = f"options of the experts: {error}; needed: fields of SonicMoEConfig (docs/env.md)"
        raise ConfigError(words) from None
    if config.resolve().first_backward is not FirstBackward.ADD:
        raise ConfigError(
            "first_backward='overwrite' needs node.step() in each optimizer step, and "
            "Megatron-Core calls none; needed: overwrite_main_grad of the parameters, as "
            "Megatron-FSDP sets it, or no such option"
        )
    return config


def check_options(config: Any, own: SonicMoEConfig, *, asked: bool) -> None:
    """Refuse, with a ConfigError, what the experts would do otherwise than the configuration says.

    asked: `fp8_mode` was given by name.
    """
    for words in _refusals(config, own.resolve().fp8, asked):
        raise ConfigError(words)


def _refusals(config: Any, fp8: bool, asked: bool) -> Iterator[str]:
    for name, reason in _UNSERVED.items():
        if getattr(config, name, None):
            yield f"{name} is {getattr(config, name)!r}: {reason}"
    for name in ("fp8", "quant_recipe"):
        value = getattr(config, name, None)
        if value and not asked:
            yield (
                f"{name} is {value!r}, which is Transformer Engine's, and experts here quantise as "
                "fp8_mode says; needed: fp8_mode='perf', 'mem' or 'off' for the experts, by name"
            )
    shards = getattr(config, "expert_gtp_weight_remat_size", 1)
    if shards > 1:
        yield (
            f"expert_gtp_weight_remat_size is {shards}: each rank has its experts' weights whole "
            "here; needed: 1 (no expert_tensor_parallel_num_weight_shards)"
        )
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        yield (
            "transformer_impl is 'inference_optimized': its dispatcher sends tokens that nobody has "
            "sorted; needed: 'transformer_engine' or 'local'"
        )
    if getattr(config, "activation_func_fp8_input_store", False) and not fp8:
        yield (
            "activation_func_fp8_input_store is True: experts here save the input of the "
            "activation in 8 bits in the FP8 modes; needed: fp8_mode='perf' or 'mem', or False"
        )
    offloads = getattr(config, "fine_grained_activation_offloading", False)
    if offloads and (found := sorted(_OFFLOADED.intersection(config.offload_modules or ()))):
        yield (
            f"offload_modules has {found}: the experts are one operation here; needed: "
            "offload_modules without them"
        )
    if puts_off(config) and not config.gradient_accumulation_fusion:
        yield (
            "delay_wgrad_compute with gradient_accumulation_fusion False: weight gradients that "
            "are put off go to main_grad; needed: gradient_accumulation_fusion True"
        )
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        topk = config.moe_router_topk
        yield f"moe_apply_probs_on_input with moe_router_topk {topk}; needed: moe_router_topk 1"


def puts_off(config: Any) -> bool:
    """Whether a schedule runs the weight gradients of the experts."""
    overlaps = getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
    return bool(getattr(config, "delay_wgrad_compute", False) or overlaps)


def activation_of(config: Any) -> tuple[ActivationType, ActivationParameters]:
    """The engine's activation that the configuration means. ConfigError where no engine has it; the
    message names the options that decide.
    """
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    gated = config.gated_linear_unit
    if gated and config.activation_func is quick_gelu and offset == 1.0 and limit is not None:
        return ActivationType.SWIGLU_OAI, (("limit", float(limit)),)
    function = config.activation_func
    if function is _F.gelu and getattr(config, "use_te_activation_func", False):
        function = fast_gelu  # Transformer Engine has the tanh form only
    found = dict(_GATED if gated else _PLAIN).get(function)
    if gated and found is ActivationType.SWIGLU and limit is not None and offset == 0.0:
        return ActivationType.SWIGLU_CLAMP, (("limit", float(limit)),)
    # The stock experts read both only where there is a gate.
    if found is not None and (not gated or (limit is None and offset == 0.0)):
        return found, ()
    name = getattr(config.activation_func, "__name__", repr(config.activation_func))
    raise ConfigError(
        f"no engine has activation_func {name} with gated_linear_unit {gated}, "
        f"activation_func_clamp_value {limit} and glu_linear_offset {offset}; needed: silu, gelu, "
        "fast_gelu or relu; squared_relu without a gate; with one also silu and a clamp value, or quick_gelu, a "
        "clamp value and an offset of 1"
    )


def sizes_of(config: Any, num_local_experts: int, tensor_parallel: int) -> Sizes:
    """E, H and I on this rank; ShapeError where I cannot be divided."""
    inner = config.moe_ffn_hidden_size
    expect(
        inner % tensor_parallel == 0,
        ShapeError,
        f"moe_ffn_hidden_size is {inner} on {tensor_parallel} ranks of expert tensor parallelism; "
        "needed: a multiple of their number",
    )
    hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
    return Sizes(num_local_experts, hidden, inner // tensor_parallel)


def check_sizes(sizes: Sizes, own: SonicMoEConfig, activation: ActivationType, bias: bool) -> None:
    """Refuse sizes that no engine with kernels takes, wherever the model is built: training would
    run on plain tensor operations. An engine that is asked for by name says more itself.
    """
    resolved = own.resolve()
    if resolved.engine is not EngineName.AUTO:
        return
    settings = EngineSettings.from_config(resolved.replace(fp8_mode="off"), activation)
    lost = lost_on_gpus(Workload(settings, sizes.hidden, sizes.inner, bias=bias))
    expect(
        lost is None,
        ShapeError,
        f"hidden_size (or moe_latent_size) is {sizes.hidden}, and moe_ffn_hidden_size gives "
        f"{sizes.inner} on each rank: {lost}; needed: sizes that an engine takes, or "
        "engine='reference' by name",
    )
