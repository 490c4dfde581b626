"""FSDP2 gathers the experts' weights as FP8 codes: one call before `fully_shard`.

    gather_codes(model)
    for layer in model.model.layers:
        fully_shard(layer)

docs/finetuning.md shows it for models of transformers. `weights/gathered.py` does the work.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .config import active_config
from .enums import ActivationType, layer_parameters, member_of
from .errors import LayoutError, ShapeError, expect
from .functional import layout_of
from .layer.plan import Plan, check_use_fp8, make_plan
from .layouts import NATIVE, GateUp, WeightLayout
from .log import log_once
from .moe import MoE, under_wrappers
from .observe import MOE, STACKED
from .weights.gathered import Chosen, LayerCodes

Tensor = torch.Tensor
Named = tuple[nn.Module, str]


class FoundExperts(NamedTuple):
    """Experts of a model. weights: w1, w2, or gate, up, w2, by the module that has them and their
    names. plan: of their calls under the configuration in force, given `use_fp8`; None where
    another implementation computes them.
    """

    weights: tuple[Named, ...]
    layout: WeightLayout
    bias: bool
    plan: Callable[[bool | None], Plan | None]


# What finds experts of each face; an integration adds its own.
finders: list[Callable[[nn.Module], FoundExperts | None]] = []


def gather_codes(
    model: nn.Module,
    *,
    use_fp8: bool | None = None,
    weights: tuple[Any, str] | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    concat_layout: bool = False,
    activation_parameters: Mapping[str, float | None] | None = None,
) -> int:
    """Have FSDP2 gather e4m3 codes and block scales of the experts in `model`, and no values: half the
    bytes of bf16, quantised on each rank's shard once after an optimizer step. Call it before
    `fully_shard` or accelerate's `prepare`. Gradients, parameters, their names, optimizers and
    checkpoints stay as they are.

    Where the calls of a layer do not compute in FP8, or its engine has codes of another form, or the
    recipe has other codes in backward, its values are gathered as without this call. The first
    gather decides that, under the configuration in force now.

    Args:
        model: with `MoE` layers, experts of transformers, or experts of torchtitan; or, with
            `weights`, a module that passes its own parameters to the functional API.
        use_fp8: what the calls pass under this name; transformers' `sonicmoe_fp8` needs none.
        weights: names of parameters of `model`, `[E, N1, H]` and `[E, H, I]`: `(w1, w2)`, or
            `((gate, up), w2)` with two `[E, I, H]`.
        activation_type, concat_layout, activation_parameters: with `weights`, as of
            `moe_TC_softmax_topk_layer`.

    Returns:
        The number of layers with experts.

    Raises:
        LayoutError: there are no experts, some are such as no engine computes, or FSDP2 has sharded
            a module already.
        ShapeError: a parameter of `weights` has not three axes.
        ConfigError: an unknown activation, or `use_fp8` is none of True, False and None.
    """
    check_use_fp8(use_fp8)
    _check_unsharded(model)
    if weights is not None:
        activation = member_of(ActivationType, activation_type, "activation_type")
        own = layer_parameters(activation, activation_parameters)
        found = [_functional(model, weights, activation, concat_layout, own)]
    else:
        found = [each for module in model.modules() if (each := _found(module)) is not None]
    kind = type(model).__name__
    words = "no MoE layer, and no experts of transformers or torchtitan on this engine"
    expect(bool(found), LayoutError, f"{kind} has {words}; needed: one, or weights by name")
    for experts in found:
        coded(experts, use_fp8)
    return len(found)


def coded(experts: FoundExperts, use_fp8: bool | None = None) -> LayerCodes:
    """Have the codes of these experts gathered."""
    return LayerCodes(experts.weights, experts.layout, _chooser(experts, use_fp8))


def _check_unsharded(model: nn.Module) -> None:
    # Looked up and not imported: a process that never loaded it cannot have used it.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in model.named_modules():
        words = f"fully_shard was applied to {name or 'the model'}; needed: gather_codes before it"
        expect(not isinstance(module, sharded), LayoutError, words)


def _found(module: nn.Module) -> FoundExperts | None:
    for finder in finders:
        if (found := finder(module)) is not None:
            return found
    return None


def _moe(module: nn.Module) -> FoundExperts | None:
    if not isinstance(module, MoE):
        return None
    inner = [under_wrappers(part) for part in (module.c_fc, module.c_proj)]

    def plan(use_fp8: bool | None) -> Plan:
        given = module.activation_function, NATIVE, use_fp8, module.activation_parameters, MOE
        return make_plan(*given)

    first, second = inner
    named = (first, "weight"), (second, "weight")
    return FoundExperts(named, NATIVE, first.bias is not None, plan)


finders.append(_moe)


def _functional(
    model: nn.Module,
    weights: tuple[Any, str],
    activation: ActivationType,
    concat_layout: bool,
    parameters: Any,
) -> FoundExperts:
    first, second = weights
    names = (*first, second) if isinstance(first, tuple) else (first, second)
    held: list[Any] = [model._parameters.get(name) for name in names]
    for name, weight in zip(names, held, strict=True):
        words = f"{name} is no parameter of {type(model).__name__} itself; needed: the module's own"
        expect(weight is not None, LayoutError, words)
        words = f"{name} has shape {tuple(weight.shape)}; needed: experts first, then two axes"
        expect(weight.dim() == 3, ShapeError, words)
    layout = layout_of(activation, concat_layout, GateUp(*held[:2]) if len(held) == 3 else None)

    def plan(use_fp8: bool | None) -> Plan:
        return make_plan(activation, layout, use_fp8, parameters, STACKED)

    return FoundExperts(tuple((model, name) for name in names), layout, False, plan)


def _chooser(
    experts: FoundExperts, use_fp8: bool | None
) -> Callable[[Sequence[Tensor]], Chosen | None]:
    """What `LayerCodes` asks, under the configuration in force now: FSDP2 gathers on other threads too."""
    config = active_config()

    def choose(parts: Sequence[Tensor]) -> Chosen | None:
        with config.activate():
            plan = experts.plan(use_fp8)
        if plan is None or plan.settings.recipe is None:
            _say_values("the experts compute without FP8")
            return None
        down = parts[-1]
        # Parameters in fp32 are those of a job that computes in bf16, by autocast or FSDP2's policy.
        dtype = torch.bfloat16 if down.dtype == torch.float32 else down.dtype
        hidden = int(down.shape[2 if experts.layout.transposed else 1])
        tokens = torch.empty((0, hidden), dtype=dtype, device=down.device)
        bias = down if experts.bias else None
        fitted = plan.fitted_to(tokens, (parts[0], down, bias, bias))
        engine, settings = fitted.chosen, fitted.settings
        recipe = settings.recipe
        if recipe is not None and recipe.shares_weight_buffers and engine.joins_codes:
            return engine, settings
        _say_values(f"engine {engine.name!r} has other codes in a backward, or of all experts")
        return None

    return choose


def _say_values(why: str) -> None:
    log_once(logging.INFO, "gather_codes: FSDP2 gathers values of the experts, because %s", why)
