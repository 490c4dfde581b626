"""Low-rank adapters on the experts of `MoE`: as an argument, and as peft puts them around `c_fc` and
`c_proj`.
"""

from __future__ import annotations

import pytest
import torch
from functional.layer_golden import make_layer, make_tokens
from functional.test_frozen_moe import pairs
from torch.utils.checkpoint import checkpoint

E, H, I = 5, 32, 24


def frozen_layer(bias=False):
    moe = make_layer(bias=bias)
    moe.c_fc.requires_grad_(False)
    moe.c_proj.requires_grad_(False)
    return moe


def run(moe, adapters, *arguments, **options):
    """Output, and the gradients of tokens and factors."""
    x = make_tokens(19, H).requires_grad_()
    out, aux = moe(x, *arguments, adapters=adapters, **options)
    wanted = [x, moe.router.weight, *[f for f in adapters.factors if f is not None]]
    return [out.detach(), *torch.autograd.grad(out.square().sum() + aux, wanted)]


@pytest.mark.parametrize("fp8", [False, True])
def test_bits_repeat_in_checkpoints_and_in_one_graph(fp8):
    moe = frozen_layer(bias=True)
    adapters = pairs(moe, dtype=torch.bfloat16)
    wanted = run(moe, adapters, use_fp8=fp8)
    assert all(gradient.dtype == torch.bfloat16 for gradient in wanted[3:])

    def checkpointed(x, **options):
        return checkpoint(moe, x, use_reentrant=False, **options)

    checkpointed.router = moe.router
    torch._dynamo.reset()
    graph = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for layer in (moe, checkpointed):
        found = run(layer, adapters, use_fp8=fp8)
        assert all(map(torch.equal, found, wanted))
    # The graph's router adds in another order.
    torch.testing.assert_close(run(graph, adapters, use_fp8=fp8), wanted, rtol=2e-2, atol=2e-2)


def test_inference_keeps_nothing():
    moe = frozen_layer()
    adapters = pairs(moe)
    with torch.no_grad():
        out = moe(make_tokens(19, H), adapters=adapters)[0]
    assert not out.requires_grad
    assert torch.equal(out, run(moe, adapters)[0])


class TestOfPeft:
    @staticmethod
    def adapted(targets=("c_fc.weight", "c_proj.weight"), **options):
        peft = pytest.importorskip("peft", minversion="0.17")
        options = {"r": 3, "target_modules": [], "init_lora_weights": False, **options}
        torch.manual_seed(2)
        config = peft.LoraConfig(target_parameters=list(targets), **options)
        return peft.get_peft_model(make_layer(bias=True), config)

    def test_are_the_same_as_merged(self):
        model = self.adapted()
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
