"""PaddleFleet's handle of a gradient that the combine sent in FP8: read when the backward runs,
emptied then, and nothing guessed where it is empty or somebody else's.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from engine.fp8_arrivals import ISO128, run
from engine.moe_golden import make_problem
from fleet.fleet_calls import assert_same, bf16
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import counts_of
from node.test_node_fp8 import bf16_layer

from sonicmoe.errors import ConfigError
from sonicmoe.fleet.carrier import declare_carrier, tokens_from_carrier
from sonicmoe.fleet.combine_grad import CombineGradient, combine_gradient
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast as quantize_fast
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.tokens import quantize_tokens

if IS_PADDLE:
    from paddle.autograd import PyLayer
    from paddle.distributed.fleet.utils import recompute

WORDS = ("fp32_1x128", "e8m0_1x32")


pytestmark = pytest.mark.usefixtures("undeclared")


@pytest.fixture(scope="module")
def problem():
    return make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16)


def as_bytes(words):
    """What Fleet makes of packed words when they have arrived."""
    return words.view(torch.uint8)


def filled(dout):
    """A handle as Fleet's combine leaves it: codes, and the bytes of packed words."""
    codes, words = quantize_fast(dout, pack_scale_words=True)
    return {"data": codes, "scale": as_bytes(words)}


def bits(tokens):
    return numpy(tokens.bytes.to(torch.int32)), numpy(tokens.scale_inv)


@pytest.fixture(scope="module")
def dout(problem):
    return bf16(problem.dout)


class TestTheHandle:
    @pytest.mark.parametrize(
        ("words", "packed"), [*((each, "bytes") for each in WORDS), ("fp32_1x128", "words")]
    )
    def test_packed_words_of_every_meaning(self, dout, words, packed):
        declare_carrier(words)
        codes, scale = quantize_fast(dout, pack_scale_words=True)
        handle = {"data": codes, "scale": as_bytes(scale) if packed == "bytes" else scale}
        found = CombineGradient(handle).take(dout)
        wanted = tokens_from_carrier(codes, scale).tokens
        assert_same(bits(found), bits(wanted))

    @pytest.mark.parametrize("scale_dtype", ["int32", "float32"])
    def test_scales_that_are_not_packed(self, dout, scale_dtype):
        """One E8M0 byte a word, as the allgather dispatcher asks for, and fp32 multipliers."""
        codes, scale = quantize_fast(dout, scale_dtype=getattr(torch, scale_dtype))
        found = CombineGradient({"data": codes, "scale": scale}).take(dout)
        assert isinstance(found, BlockScaledTensor) and found.scale_inv.shape[1] == 2

    def test_is_emptied_after_use_and_holds_no_memory(self, dout):
        handle = filled(dout)
        memory = weakref.ref(handle["scale"])
        source = CombineGradient(handle)
        found = source.take(dout)
        assert handle == {}
        del found
        gc.collect()
        assert memory() is None

    def test_is_read_late(self, dout):
        """Empty in the forward, filled before the backward."""
        handle = {}
        source = combine_gradient(handle)
        handle.update(filled(dout))
        assert isinstance(source.take(dout), BlockScaledTensor)

    def test_a_placeholder_is_not_read(self, dout):
        nan = bf16(np.full((37, 256), np.nan))
        found = CombineGradient(filled(dout)).take(nan)
        assert_same(bits(found)[:1], bits(quantize_tokens(dout))[:1])

    def test_none_is_no_source_and_an_empty_one_was_not_sent_in_fp8(self, dout):
        """A group of one rank, and a combine under refined recompute."""
        assert combine_gradient(None) is None
        assert CombineGradient({}).take(dout) is dout

    @pytest.mark.parametrize("filling", [{}, {"data": 0, "scale": 0}])
    def test_an_entry_of_fleets_own_is_left_alone(self, dout, filling):
        handle = {"using_sonic_moe": True} | (filled(dout) if filling else {})
        found = CombineGradient(handle).take(dout)
        assert isinstance(found, BlockScaledTensor) is bool(filling)
        assert handle == {"using_sonic_moe": True}


def test_a_handle_that_is_refused_stays_filled(dout):
    """A user who gets the error can look at the handle that it is about."""
    handle = filled(dout) | {"event": None}
    with pytest.raises(ConfigError, match="has the keys"):
        CombineGradient(handle).take(dout)
    assert handle.keys() == {"data", "scale", "event"}


@pytest.mark.skipif(not IS_PADDLE, reason="PaddleFleet's combine, whose gradient is e4m3")
class TestUnderPaddle:
    """The experts between PyLayers that do what Fleet's combine does."""

    def combine(self, out, handle):
        class Combine(PyLayer):
            @staticmethod
            def forward(ctx, out):
                return out.clone()

            @staticmethod
            def backward(ctx, dout):
                handle.update(filled(dout))
                return handle["data"]

        return Combine.apply(out)

    def inputs(self, problem):
        x = tensor(problem.x, torch.float32, grad=True)
        return x, tensor(problem.probs, torch.float32, grad=True)

    def call(self, layer, x, probs, handle):
        given = counts_of(layer.problem), tensor(layer.problem.indices), probs, None, None
        return layer.node(x.astype("bfloat16"), *given, combine_gradient(handle))

    @pytest.mark.parametrize("way", ["plain", "recomputed", "recomputed again"])
    def test_the_experts_take_codes_and_scales(self, problem, way):
        layer, handle = bf16_layer(problem), {}
        x, probs = self.inputs(problem)

        def experts(x, probs):
            return self.call(layer, x, probs, handle)

        again = {"use_reentrant": way == "recomputed"}
        plain = way == "plain"
        out = experts(x, probs) if plain else recompute(experts, x, probs, **again)
        self.combine(out, handle).backward(bf16(problem.dout))
        assert handle == {}
        wanted = run(problem, ISO128, quantize_tokens(bf16(problem.dout)))
        assert_same([numpy(x.grad), numpy(probs.grad)], [wanted.dx, wanted.dprobs])
