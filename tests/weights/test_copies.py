"""Copies of weights on the engines' own terms: the Hopper engine's buffers, and how long they live.

tests/node/test_node_copies.py has the life of copies through a node.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from framework import numpy, torch
from weights.freed_memory import free
from weights.weight_sources import fused_weights, weight_arrays

from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.errors import LayoutError
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import dequantize
from sonicmoe.weights.copies import WeightCopies
from sonicmoe.weights.stacked import FusedParameters

FP8 = EngineSettings(recipe=RECIPES["dx256"])
ISO = replace(FP8, iso_weight=True)
GROUPED = WeightLayout(transposed=True, split_half=True)


def make_layer(dtype=None):
    up, down = weight_arrays(hidden=32, intermediate=64)
    weights = fused_weights(up, down, dtype or torch.bfloat16)
    return FusedParameters(*weights, ActivationType.SWIGLU)


class TestHopperEngine:
    """Its quantiser serves host tensors too; its passes run in tests/gpu."""

    @pytest.mark.parametrize("settings", [FP8, ISO], ids=["two orders", "iso"])
    def test_codes_are_the_reference_engines(self, settings):
        layer = make_layer()
        ours = WeightCopies(HopperEngine(), settings, layer).weights
        theirs = WeightCopies(ReferenceEngine(), settings, layer).weights
        assert ours.two_orders is theirs.two_orders is (settings is FP8)
        for name in ("w1", "w2", "w1_dgrad", "w2_dgrad"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.orientation is other.orientation
            assert np.array_equal(numpy(one.bytes), numpy(other.bytes))
            assert np.array_equal(numpy(one.scale_inv), numpy(other.scale_inv))

    def test_the_store_goes_with_forwards_order(self):
        layer, engine = make_layer(), HopperEngine()
        copies = WeightCopies(engine, FP8, layer)
        store = weakref.ref(copies.weights.store)
        forward = weakref.ref(copies.weights.w1)
        assert copies.release_forward() == ""
        gc.collect()
        assert store() is None and forward() is None
        left = copies.weights
        assert (left.num_experts, left.hidden_size, left.intermediate_size) == (3, 32, 64)
        assert left.store is None

    def test_freed_weights_are_never_asked(self):
        layer, engine = make_layer(), HopperEngine()
        copies = WeightCopies(engine, FP8, layer)
        expected = numpy(dequantize(copies.weights.w1))
        free(*layer.parameters())
        reading = copies.read(engine, FP8, layer, layer.parameters())
        assert np.array_equal(numpy(dequantize(reading.weights.w1)), expected)


def test_copies_keep_no_parameter_alive_and_no_parameter_is_mistaken():
    layer = make_layer()
    copies = WeightCopies(ReferenceEngine(), FP8, layer)
    parameter = weakref.ref(layer.parameters()[0])
    del layer
    gc.collect()
    assert parameter() is None
    # Whatever came to lie where the old ones were.
    other = make_layer()
    with pytest.raises(LayoutError, match="made of other parameters"):
        copies.read(ReferenceEngine(), FP8, other, other.parameters())
