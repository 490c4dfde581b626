"""PaddleFleet's handle of a gradient that the combine sent in FP8: every form of its scales, emptied
after use, and nothing guessed where it is somebody else's. Face `steps` of tests/oracle has it filled
late, left empty, and beside a placeholder; test_double.py has Fleet's combine.
"""

from __future__ import annotations

import gc
import weakref

import pytest
from engine.moe_golden import make_problem
from fleet.fleet_calls import assert_same, bf16
from framework import numpy, torch

from sonicmoe.errors import ConfigError
from sonicmoe.fleet.carrier import declare_carrier, tokens_from_carrier
from sonicmoe.fleet.combine_grad import CombineGradient
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast as quantize_fast
from sonicmoe.quant.format import BlockScaledTensor

WORDS = ("fp32_1x128", "e8m0_1x32")


pytestmark = pytest.mark.usefixtures("undeclared")


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
def dout():
    return bf16(make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16).dout)


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
