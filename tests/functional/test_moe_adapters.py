"""Low-rank adapters on the experts of `MoE`: as peft puts them around `c_fc` and `c_proj`, and beside
experts that are frozen as FP8 codes alone. tests/oracle has those that come as an argument.
"""

from __future__ import annotations

import pytest
import torch
from functional.layer_golden import make_layer, make_tokens
from torch.utils.checkpoint import checkpoint

from sonicmoe import Adapters, LowRank, SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.integrations.frozen import freeze_experts, frozen_bytes
from sonicmoe.quant.recipes import ScaleFormat
from sonicmoe.weights import frozen

H = 32


def pairs(moe, rank=3, dtype=torch.float32):
    """Adapters of both projections."""
    generator = torch.Generator().manual_seed(5)

    def pair(experts):
        count, outputs, inputs = experts.weight.shape
        sizes = (count, rank, inputs), (count, outputs, rank)
        factors = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
        return LowRank(*[factor.requires_grad_() for factor in factors], 0.3)

    return Adapters(pair(moe.c_fc), pair(moe.c_proj))


def run(moe, adapters, how="eager", **options):
    x, called = make_tokens(19, H).requires_grad_(), moe
    if how == "compiled":
        torch._dynamo.reset()
        called = torch.compile(moe, backend="aot_eager", fullgraph=True)

    def call(tokens):
        return called(tokens, adapters=adapters, use_fp8=True, **options)[0]

    out = checkpoint(call, x, use_reentrant=False) if how == "checkpoint" else call(x)
    wanted = [x, moe.router.weight, *adapters.factors]
    wanted += [] if moe.c_fc.bias is None else [moe.c_fc.bias, moe.c_proj.bias]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.parametrize("activation", [a for a in ActivationType if a.value != "identity"])
def test_every_gate_computes_as_beside_its_weights(activation, monkeypatch):
    moe = make_layer(activation, bias=True)
    adapters = pairs(moe)
    wanted = run(moe, adapters)
    # As the engine makes codes of weights that it has.
    monkeypatch.setattr(frozen, "_FORMATS", (ScaleFormat.FP32,))
    freeze_experts(moe)
    for one, other in zip(run(moe, adapters), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["checkpoint", "compiled", "recomputed z"])
def test_the_same_bits_however_it_is_called(how):
    moe = make_layer(bias=True)
    adapters = pairs(moe, dtype=torch.bfloat16)
    freeze_experts(moe)
    wanted = run(moe, adapters)
    assert all(gradient.dtype == torch.bfloat16 for gradient in wanted[3:7])
    with SonicMoEConfig(recompute_z=how == "recomputed z").activate():
        found = run(moe, adapters, how)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_memory_and_state():
    moe = make_layer()
    weights = moe.c_fc.weight.numel() + moe.c_proj.weight.numel()
    freeze_experts(moe)
    assert weights < frozen_bytes(moe) < 1.02 * weights
    assert {"c_fc.weight_e4m3", "c_fc.weight_scale_inv"} < set(moe.state_dict())
    other = make_layer(seed=1)
    freeze_experts(other)
    other.load_state_dict(moe.state_dict())
    adapters = pairs(moe)
    for one, two in zip(run(moe, adapters), run(other, adapters), strict=True):
        assert torch.equal(one, two)


def adapted_by_peft():
    peft = pytest.importorskip("peft", minversion="0.17")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=3, target_modules=[], init_lora_weights=False,
        target_parameters=["c_fc.weight", "c_proj.weight"],
    )  # fmt: skip
    return peft.get_peft_model(make_layer(bias=True), config)


def test_adapters_of_peft_are_the_same_as_merged():
    model = adapted_by_peft()
    moe, x = model.get_base_model(), make_tokens(19, H)
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
