"""Layer specifications with the engine's experts: `ModuleSpec` (0.16) and builders (0.19)."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from ...errors import LayoutError, expect
from .dispatcher import SonicMoELayer
from .experts import SonicExperts


def use_sonicmoe(spec: Any, *, transport: Mapping[str, Any] | bool = True, **options: Any) -> Any:
    """A copy of `spec` whose MoE layers have the engine's experts and dispatchers.

    Args:
        spec: of an MoE layer, or of what has some below: a transformer layer, a block of layers or
            of multi-token prediction, a hybrid stack. As `get_gpt_layer_local_spec`,
            `get_gpt_decoder_block_spec` and `get_moe_module_spec` return them, and their like.
        transport: options of `sonicmoe.ep.make_dispatcher` for layers whose `moe_token_dispatcher_type`
            is `alltoall` or `allgather`, such as `{"kind": "collective"}`; False keeps Megatron's.
        options: fields of `SonicMoEConfig` for every such layer, such as `fp8_mode="perf"`.

    Raises:
        LayoutError: there is no MoE layer in it, or one of a class of your own, which keeps its
            dispatcher, with `transport`. Unknown options raise where the model is built.
    """
    made = copy.deepcopy(spec)
    kind = getattr(spec, "__name__", type(spec).__name__)
    needed = "a spec of an MoE layer, or of layers that have one (num_experts)"
    words = f"spec is {kind}, and no MoE layer is in it; needed: {needed}"
    expect(_replace_in(made, transport, options) > 0, LayoutError, words)
    return made


def _replace_in(spec: Any, transport: Any, options: dict[str, Any]) -> int:
    """Replace the experts of every MoE layer below; returns how many there were."""
    is_partial = isinstance(spec, functools.partial)
    module = spec.func if is_partial else getattr(spec, "module", None)
    if not (isinstance(module, type) and issubclass(module, MoELayer)):
        return sum(_replace_in(each, transport, options) for each in _parts(spec))
    submodules = spec.keywords.get("submodules") if is_partial else spec.submodules
    words = f"the spec of a {module.__name__} has no submodules; needed: MoESubmodules"
    expect(submodules is not None, LayoutError, words)
    submodules.experts = _experts(is_partial, options)
    # A class of the user's own keeps its dispatcher.
    words = f"transport is {transport}, and {module.__name__} has a dispatcher of its own"
    is_stock = module in (MoELayer, SonicMoELayer)
    expect(is_stock or transport is True, LayoutError, f"{words}; needed: no such argument")
    if is_stock and is_partial:
        named = {**spec.keywords, "transport": transport}
        spec.__setstate__((SonicMoELayer, spec.args, named, spec.__dict__))
    elif is_stock:
        spec.module, spec.params = SonicMoELayer, {**spec.params, "transport": transport}
    return 1


def _parts(spec: Any) -> Iterable[Any]:
    """Of a list of layers, of a spec, of a builder, or of their submodules."""
    if isinstance(spec, list | tuple):
        return spec
    if isinstance(spec, functools.partial):
        return spec.keywords.values()
    is_record = dataclasses.is_dataclass(spec) and not isinstance(spec, type)
    return vars(spec).values() if is_record else ()


def _experts(is_builder: bool, options: dict[str, Any]) -> Any:
    if is_builder:
        return functools.partial(SonicExperts, **options)
    return ModuleSpec(module=SonicExperts, params=options)
