"""Adapters of peft around `c_fc` and `c_proj` of `MoE`. tests/oracle has those that come as an argument."""

from __future__ import annotations

import pytest
import torch
from functional.layer_golden import make_layer, make_tokens

from sonicmoe import Adapters
from sonicmoe.errors import ConfigError, LayoutError


def adapted(targets=("c_fc.weight", "c_proj.weight"), **options):
    peft = pytest.importorskip("peft", minversion="0.17")
    torch.manual_seed(2)
    options = {"r": 3, "target_modules": [], "init_lora_weights": False, **options}
    config = peft.LoraConfig(target_parameters=list(targets), **options)
    return peft.get_peft_model(make_layer(bias=True), config)


def test_adapters_of_peft_are_the_same_as_merged():
    model = adapted()
    moe, x = model.get_base_model(), make_tokens(19, 32)
    apart, aux = model(x)
    (apart.square().sum() + aux).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    plain = moe(x, "torch")[0]
    torch.testing.assert_close(apart, plain, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert (moe(x)[0] - apart).norm() > 0.1 * apart.norm()
    model.merge_adapter()
    torch.testing.assert_close(moe(x)[0], apart, rtol=1e-4, atol=1e-4)


RANKS = r"^active adapters \['default'\] of weight have ranks \(r\) of 129 in all, above 128"


@pytest.mark.parametrize(
    ("error", "words", "peft", "given"),
    [
        (ConfigError, "adapters came as an argument, and peft has some", {}, {"adapters": Adapters()}),
        (ConfigError, RANKS, {"r": 129}, {}),
        (LayoutError, "c_fc is ParamWrapper, an adapter that would do", {"targets": ["c_fc.bias"]}, {}),
    ],
)  # fmt: skip
def test_adapters_of_peft_that_are_refused(error, words, peft, given):
    with pytest.raises(error, match=words):
        adapted(**peft)(make_tokens(19, 32), **given)
