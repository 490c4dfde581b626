"""Every tensor of every function of the PyTorch face, in forms that none may read."""

from __future__ import annotations

import pytest
from framework import torch
from functional.layer_golden import make_layer, make_tokens, views

from sonicmoe import (
    moe_ep_general_routing_forward,
    moe_ep_TC_softmax_topk_forward,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)
from sonicmoe.config import SonicMoEConfig
from sonicmoe.distributed_utils import CombineMode, NetworkProfiler, RuntimeEPConfig
from sonicmoe.errors import ConfigError, EngineUnavailableError, RoutingError, SonicMoEError


def arguments(function):
    """What a function takes for one layer, by name."""
    moe, x = make_layer(bias=True), make_tokens(6, 32)
    given = dict(zip(("x", "w1", "b1", "w2", "b2"), (x, *views(moe)), strict=True))
    spread = function.__name__.startswith("moe_ep")
    if spread:
        given |= {"w2": moe.c_proj.weight.permute(0, 2, 1), "E": 5}
    ids = torch.tensor([[0, 1], [2, 3]] * 3)
    if "TC" in function.__name__:
        return given | {"router_w": moe.router.weight, "K": 2}
    if spread:
        return given | {"topk_indices": ids, "topk_scores": torch.rand(6, 2)}
    rows = torch.arange(6).repeat_interleave(2)
    names = "token_indices", "expert_indices", "router_scores"
    return given | dict(zip(names, (rows, ids.flatten(), torch.rand(12)), strict=True))


FUNCTIONS = pytest.mark.parametrize(
    "function",
    [
        moe_TC_softmax_topk_layer,
        moe_general_routing_inputs,
        moe_ep_TC_softmax_topk_forward,
        moe_ep_general_routing_forward,
    ],
)


@FUNCTIONS
@pytest.mark.parametrize("use_fp8", [False, True])
def test_what_no_engine_reads_is_refused_by_name(function, use_fp8):
    given = arguments(function)
    function(**given, use_fp8=use_fp8)
    tensors = {name: value.detach() for name, value in given.items() if hasattr(value, "detach")}
    for name, value in tensors.items():
        forms = {
            "list": value.tolist(), "meta": value.to("meta"), "sparse": value.to_sparse(), "bool": value.bool(),
            "complex": value.to(torch.complex64), "codes": value.to(torch.float8_e4m3fn),
        }  # fmt: skip
        for form, wrong in forms.items():
            error, words = SonicMoEError, rf"\b{name}\b"
            if form == "list":
                error, words = TypeError, f"^{name} must be a torch tensor, got list$"
            with pytest.raises(error, match=words):
                function(**given | {name: wrong}, use_fp8=use_fp8)


def test_options_of_expert_parallelism_are_refused_by_name():
    given = arguments(moe_ep_general_routing_forward)
    for changes, error, words in (
        ({"E": 4}, ValueError, r"w1 has shape .* with L = E / W = 4"),
        ({"E": True}, RoutingError, "E is True; 1 ranks need a positive multiple of 1"),
        ({"ep_config": RuntimeEPConfig(2, 2)}, ConfigError, "W = 2 and K = 2; needed: 1 ranks and 2"),
        ({"group": "all"}, ConfigError, "group is str; needed: a process group, or None"),
        ({"CPU_sync_on_runtime": "no"}, ConfigError, "CPU_sync_on_runtime is 'no'; needed: True or"),
        ({"ep_config": "AG"}, ConfigError, "ep_config is str; needed: a RuntimeEPConfig"),
        ({"redispatch_x_in_backward": True}, ConfigError, "redispatch_x_in_backward is True; needed"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            moe_ep_general_routing_forward(**given | changes)
    with pytest.raises(ConfigError, match="combine_mode is 'RS'; needed: one of"):
        RuntimeEPConfig(1, 2, combine_mode="RS")
    assert RuntimeEPConfig(1, 2).combine_mode is CombineMode.A2A_COMBINE_TRITON
    with pytest.raises(EngineUnavailableError, match="leave ep_config out"):
        NetworkProfiler(T_local=6, H=32, K=2, dtype=torch.float32).profile()


@FUNCTIONS
def test_gradients_that_are_to_be_written_are_refused(function):
    """Autograd adds those of every function here, and of `MoE`."""
    refused = "first_backward='overwrite' writes main_grad, and here autograd"
    with SonicMoEConfig(first_backward="overwrite").activate():
        with pytest.raises(ConfigError, match=refused):
            function(**arguments(function))
        with pytest.raises(ConfigError, match=refused):
            make_layer()(make_tokens(6, 32))
