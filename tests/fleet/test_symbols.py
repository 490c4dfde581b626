"""The table of names: the objects are ours, once, and callable as PaddleFleet calls them."""

from __future__ import annotations

import inspect

import pytest
from framework import IS_PADDLE

from sonicmoe.enums import ActivationType
from sonicmoe.errors import FrameworkError
from sonicmoe.fleet.symbols import MOUNT, SYMBOLS, mounted_modules

CALLED = [symbol for symbol in SYMBOLS if symbol.parameters is not None]

# Every name of the contract, by module.
CONTRACT = {
    "functional": {
        "_refresh_fp8_config", "_UpProjection", "_DownProjection",
        "attach_preallocated_gated_outputs", "clear_all_fp8_weight_caches",
        "set_wgrad_deferral_hook", "_WGRAD_DEFERRAL_HOOK",
    },
    "functional.utils": {"enable_fp8"},
    "quack_utils": {"quantize_activation_blockscaled_fast", "quantize_native_fp8_weights"},
    "quack_utils.activation_situ": {"encode_situ_activation"},
    "quack_utils.blockscaled_fp8_gemm": {"_scatter_router_scores_i32"},
    "ernie_compat.weight_layout_fusion": {
        "fused_grouped_w1_to_sonic", "fused_sonic_w1_to_grouped", "fused_transpose_w2_layout",
    },
    "ernie_compat.deepep_metadata": {
        "deepep_topk_to_sonic_metadata", "deepep_topk_to_sonic_metadata_with_scales",
    },
    "ernie_compat.mlp_node_v2": {"_differentiable_router_scores"},
    "enums": {"ActivationType"},
    "": {"run_sonic_moe", "count_cumsum", "KernelBackendMoE", "MoE", "enable_quack_gemm"},
}  # fmt: skip


def test_every_name_of_the_contract_is_in_the_table():
    listed = {(symbol.module, symbol.name) for symbol in SYMBOLS}
    assert len(listed) == len(SYMBOLS)
    assert {(module, name) for module, names in CONTRACT.items() for name in names} <= listed


@pytest.mark.parametrize("symbol", CALLED, ids=lambda symbol: symbol.name)
def test_parameters_are_those_of_the_table(symbol):
    """tests/fleet/double calls them."""
    parameters = inspect.signature(symbol.get()).parameters.values()
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(places[: len(symbol.parameters)]) == symbol.parameters


def test_the_call_of_every_micro_batch_has_nothing_else_and_fleets_defaults():
    parameters = inspect.signature(mounted_modules()[MOUNT].run_sonic_moe).parameters
    optional = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    off = dict.fromkeys(("fp8", "release_fp8_weights", "sync_free_sizing"), False)
    none = "tokens_per_expert", "fp8_scale", "fp8_combine_grad_handle", "fp8_config"
    assert optional == off | dict.fromkeys(none) | {"activation_type": ActivationType.SWIGLU}
    assert len(parameters) == 15


class TestModules:
    def test_say_what_they_do_not_have(self):
        functional = mounted_modules()[f"{MOUNT}.functional"]
        with pytest.raises(AttributeError, match=r"sonicmoe\.functional' has no attribute 'swish'"):
            _ = functional.swish
        assert not hasattr(functional, "__wrapped__")

    def test_the_deferral_hook_is_the_one_that_is_set(self):
        functional = mounted_modules()[f"{MOUNT}.functional"]
        assert functional._WGRAD_DEFERRAL_HOOK is None
        if IS_PADDLE:
            functional.set_wgrad_deferral_hook(print)
            assert functional._WGRAD_DEFERRAL_HOOK is print
        functional.set_wgrad_deferral_hook(None)
        assert functional._WGRAD_DEFERRAL_HOOK is None

    def test_the_pytorch_face_answers_for_itself(self):
        top = mounted_modules()[MOUNT]
        if IS_PADDLE:
            with pytest.raises(FrameworkError, match="are the PyTorch face"):
                _ = top.MoE
        else:
            import sonicmoe

            assert top.MoE is sonicmoe.MoE and top.count_cumsum is sonicmoe.count_cumsum
