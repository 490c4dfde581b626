"""Tokens that arrive in FP8 on a GPU: the sender's quantiser, and an engine that is handed their
values.
"""

from __future__ import annotations

import logging

import pytest
import torch
from gpu.hopper_step import FP8, main_grads, make_batch, make_experts, make_node, run

from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize
from sonicmoe.quant.tokens import quantize_tokens, to_bfloat16

pytestmark = pytest.mark.gpu
FORMS = pytest.mark.parametrize("row_scale", [False, True], ids=["1x128", "row"])


@FORMS
def test_the_senders_codes_are_those_of_the_reference(row_scale):
    x = make_batch().x.detach()
    made = quantize_tokens(x, row_scale=row_scale)
    wanted = quantize(x, rows(x.shape[1] if row_scale else 128))
    assert torch.equal(made.bytes, wanted.bytes)
    assert torch.equal(made.scale_inv, wanted.scale_inv)


def test_the_hopper_engine_gets_the_values_of_rows_with_one_scale(caplog):
    """Bit for bit what it makes of these values as bf16 tokens; the log says so once."""
    batch, experts, plain = make_batch(), make_experts(), make_experts()
    tokens = quantize_tokens(batch.x.detach(), row_scale=True)
    node = make_node(experts, FP8)
    dx_to = torch.zeros(1, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dx_to = dx_to.expand(*tokens.shape)
    seen = []
    dx_to.register_hook(seen.append)
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        out = node(
            tokens.codes, None, batch.indices, batch.probs, x_scale=tokens.scale_inv, dx_to=dx_to
        )
    out.backward(batch.dout)
    node.step()
    (warning,) = [r.getMessage() for r in caplog.records if "dequantised" in r.getMessage()]
    assert warning.startswith("engine hopper on cuda:0: tokens that arrive in FP8")
    dprobs, batch.probs.grad = batch.probs.grad, None
    batch.x = to_bfloat16(tokens).requires_grad_()
    other = make_node(plain, FP8)
    wanted = run(other, batch)
    other.step()
    for got, expected in zip((out.detach(), *seen, dprobs), wanted, strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(main_grads(experts), main_grads(plain), strict=True):
        assert torch.equal(got, expected)
