"""Experts that are frozen as FP8 codes, as arguments of the functional API: equal bits to the layer
whose modules hold the same codes.
"""

from __future__ import annotations

import pytest
import torch
from functional.layer_golden import make_layer, make_tokens
from torch.utils.checkpoint import checkpoint

from sonicmoe.functional import (
    freeze_weights,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)
from sonicmoe.integrations.frozen import freeze_experts
from sonicmoe.layouts import WeightLayout

TOKENS, EXPERTS, TOPK = 19, 4, 2


def weights_of(moe, concat_layout):
    """The layer's weights as the functional API takes them."""
    w1, w2 = moe.c_fc.weight.detach(), moe.c_proj.weight.detach()
    w1 = WeightLayout(split_half=concat_layout).user_w1(w1)
    return w1.permute(1, 2, 0), w2.permute(1, 2, 0)


def gradients(out, *inputs):
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("how", ["eager", "compiled", "checkpoint"])
@pytest.mark.parametrize("concat_layout", [False, True])
def test_bits_of_a_layer_that_holds_the_codes(concat_layout, how):
    moe = make_layer(bias=True)
    w1, w2 = weights_of(moe, concat_layout)
    codes = freeze_weights(w1, w2, concat_layout=concat_layout)
    lost = freeze_experts(moe)
    assert codes[2] == lost and 0.01 < lost.error < 0.05
    x = make_tokens(TOKENS, w2.shape[0]).requires_grad_()
    router, (b1, b2) = moe.router.weight, (moe.c_fc.bias, moe.c_proj.bias)
    layout = WeightLayout(split_half=concat_layout)
    given = layout.user_b1(b1.detach()).requires_grad_()

    def call(x):
        arguments = x, router, codes[0], given, codes[1], b2, TOPK
        options = {"concat_layout": concat_layout, "use_fp8": True}
        return moe_TC_softmax_topk_layer(*arguments, **options)[0]

    called = call
    if how == "compiled":
        torch._dynamo.reset()
        called = torch.compile(call, backend="aot_eager", fullgraph=True)
    out = checkpoint(called, x, use_reentrant=False) if how == "checkpoint" else called(x)
    found = gradients(out, x, router, b2, given)
    found[-1] = layout.native_b1(found[-1])
    wanted = gradients(moe(x, use_fp8=True)[0], x, router, b2, b1)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_triples():
    moe = make_layer()
    w1, w2 = weights_of(moe, False)
    x = make_tokens(TOKENS, w2.shape[0]).requires_grad_()
    ids = torch.arange(TOKENS * TOPK) % EXPERTS
    scores = torch.linspace(0.1, 1, TOKENS * TOPK).requires_grad_()
    triples = scores, torch.arange(TOKENS).repeat_interleave(TOPK), ids

    def call(first, second):
        found = moe_general_routing_inputs(x, *triples, first, None, second, None, use_fp8=True)
        return gradients(found[0], x, scores)

    coded, exact = call(*freeze_weights(w1, w2)[:2]), call(w1, w2)
    for one, other in zip(coded, exact, strict=True):
        # The codes of a call are quotients of largest values, those of frozen weights what loses least.
        assert (one - other).norm() < 0.05 * other.norm()
