"""Every name that PaddleFleet takes from `paddlefleet_ops.sonicmoe`, and the object that it gets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .. import __version__

MOUNT = "paddlefleet_ops.sonicmoe"


@dataclass(frozen=True)
class Symbol:
    """One name.

    Attributes:
        module: where Fleet looks for it, below `paddlefleet_ops.sonicmoe`; "" is the top.
        name: what it is called there.
        target: our object, `module:name` below `sonicmoe`; of the same name where none is said.
        parameters: those that its callers pass, in this order; None where it is not called.
        late: looked up at every access, because it changes, or because it can be absent.
    """

    module: str
    name: str
    target: str
    parameters: tuple[str, ...] | None = None
    late: bool = False

    @property
    def mounted_in(self) -> str:
        """The full name of its module."""
        return f"{MOUNT}.{self.module}".rstrip(".")

    def get(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(f"sonicmoe.{module}".rstrip(".")), name or self.name)


def _called(module: str, name: str, target: str, parameters: str) -> Symbol:
    """A name that Fleet calls; its parameters are separated by spaces."""
    return Symbol(module, name, target, tuple(parameters.split()))


_FUSION, _DEEPEP = "ernie_compat.weight_layout_fusion", "ernie_compat.deepep_metadata"
_METADATA, _NODE = "deepep_topk_to_sonic_metadata", "ernie_compat.mlp_node_v2"
_GEMM, _SITU = "quack_utils.blockscaled_fp8_gemm", "quack_utils.activation_situ"
_RUN = (
    "hidden_states topk_indices topk_scores K E w1 w2 fp8 tokens_per_expert fp8_scale "
    "fp8_combine_grad_handle fp8_config release_fp8_weights activation_type "
    "sync_free_sizing"
)

SYMBOLS: tuple[Symbol, ...] = (
    # The expert, every micro-batch and at the events of its weights.
    _called("", "run_sonic_moe", "fleet.run", _RUN),
    _called("functional", "_refresh_fp8_config", "fleet.configuration:refresh_fp8_config", ""),
    _called("functional", "clear_all_fp8_weight_caches", "fleet.weight_copies", ""),
    _called("quack_utils", "quantize_native_fp8_weights", "fleet.weight_copies", "w1 w2 iso32"),
    _called(_FUSION, "fused_grouped_w1_to_sonic", "fleet.weight_layout", "weight"),
    _called(_FUSION, "fused_sonic_w1_to_grouped", "fleet.weight_layout", "weight"),
    _called(_FUSION, "fused_transpose_w2_layout", "fleet.weight_layout", "weight"),
    _called(_SITU, "encode_situ_activation", "fleet.situ", "beta linear_beta"),
    # The schedule that puts weight gradients off; its tests look at the hook.
    _called("functional", "set_wgrad_deferral_hook", "fleet.deferral", "hook"),
    Symbol("functional", "_WGRAD_DEFERRAL_HOOK", "fleet.deferral:_hook", late=True),
    # The dispatchers. Fleet looks into this signature for `pack_scale_words`.
    _called(
        *("quack_utils", "quantize_activation_blockscaled_fast", "fleet.quantizer"),
        "x scale_dtype pack_scale_words",
    ),
    # Its in-tree copy of `run_sonic_moe`, which binds them when it is imported.
    Symbol("enums", "ActivationType", "enums"),
    Symbol(_DEEPEP, _METADATA, "fleet.twin"),
    Symbol(_DEEPEP, f"{_METADATA}_with_scales", "fleet.twin"),
    Symbol(_NODE, "_differentiable_router_scores", "fleet.twin:differentiable_router_scores"),
    Symbol("functional", "_UpProjection", "fleet.twin:UpProjection"),
    Symbol("functional", "_DownProjection", "fleet.twin:DownProjection"),
    Symbol("functional", "attach_preallocated_gated_outputs", "fleet.twin"),
    Symbol("functional.utils", "enable_fp8", "fleet.twin"),
    Symbol(_GEMM, "_scatter_router_scores_i32", "fleet.twin:scatter_router_scores_i32"),
    # Its tests. Three belong to the PyTorch face, which says so under Paddle.
    Symbol("", "KernelBackendMoE", "enums"),
    Symbol("", "ActivationType", "enums"),
    Symbol("", "SonicMoEConfig", "config"),
    Symbol("", "MoE", "", late=True),
    Symbol("", "count_cumsum", "", late=True),
    Symbol("", "enable_quack_gemm", "", late=True),
)


class MountedModule(ModuleType):
    """A module of Fleet's engine that has no file: its names are objects of this package."""


def mounted_modules() -> dict[str, MountedModule]:
    """Fresh modules by full name, parents first, each the attribute of its parent.

    Nothing of this package is imported a second time: the names are bound to its own objects.
    """
    found: dict[str, MountedModule] = {}
    for symbol in SYMBOLS:
        module = _module(symbol.mounted_in, found)
        if not symbol.late:
            setattr(module, symbol.name, symbol.get())
    return found


def _module(name: str, found: dict[str, MountedModule]) -> MountedModule:
    if name in found:
        return found[name]
    parent, _, last = name.rpartition(".")
    # Before the module itself, so that parents come first.
    above = None if name == MOUNT else _module(parent, found)
    module = MountedModule(name, "Objects of `sonicmoe` under PaddleFleet's names.")
    # A package without a path: a submodule that is not mounted is not found, and the engine that
    # Fleet ships is never executed.
    module.__path__ = []
    module.__package__ = name
    module.__spec__ = ModuleSpec(name, None, origin="sonicmoe", is_package=True)
    module.__version__ = __version__  # type: ignore[attr-defined]
    module.__getattr__ = _getter(name)  # type: ignore[method-assign, assignment]
    if above is not None:
        setattr(above, last, module)
    found[name] = module
    return module


def _getter(module: str) -> Callable[[str], Any]:
    # Python asks this function for names that the module itself does not have, and late names are
    # never put there: the deferral hook changes, and PyTorch's face is absent under Paddle.
    late = {one.name: one for one in SYMBOLS if one.late and one.mounted_in == module}

    def get(name: str) -> Any:
        if name in late:
            return late[name].get()
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: sonicmoe has the names that PaddleFleet "
            "takes, and this is none of them"
        )

    return get
