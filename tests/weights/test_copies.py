"""Copies of weights on the engines' own terms: the Hopper engine's buffers, and how long they live.

tests/node/test_node_copies.py has the life of copies through a node.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from framework import numpy, tensor, torch
from weights.freed_memory import free
from weights.weight_sources import fused_weights, weight_arrays

from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.errors import LayoutError
from sonicmoe.layouts import NATIVE, WeightLayout, WeightSource
from sonicmoe.quant import gpu
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
        assert not left.updated_in_place

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


class Kernels:
    """The quantiser's module on a GPU, as far as its buffers are concerned."""

    def __init__(self):
        self.written = []

    def num_checksums(self, *_):
        return 4

    def store_addresses(self, *_):
        pass

    def check_weights(self, *_):
        pass

    def quantize_weights(self, table, *rest):
        self.written.append([q for q in rest[:8] if q is not None])


class TestBuffersOnTheGpu:
    """Which memory `QuantizedWeights` hands its kernels, with kernels that only look."""

    @pytest.fixture
    def kernels(self, monkeypatch):
        made = Kernels()
        monkeypatch.setattr(gpu, "_kernels", lambda _device: made)
        monkeypatch.setattr(gpu, "is_cuda", lambda _tensor: True)
        monkeypatch.setattr(gpu, "current_stream", lambda _tensor: 0)
        return made

    def source(self, layout, experts=2, hidden=32, inner=64):
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        if layout.transposed:
            shapes = tuple((e, columns, rows) for e, rows, columns in shapes)
        # Addresses of 16 bytes, which the kernels need.
        weights = (tensor(np.zeros(shape), torch.bfloat16) for shape in shapes)
        return WeightSource.stacked(*weights, layout=layout)

    @pytest.mark.parametrize("iso_weight", [False, True])
    def test_a_switch_of_the_layout_keeps_them(self, kernels, iso_weight):
        weights = gpu.QuantizedWeights(iso_weight)
        for layout in (GROUPED, NATIVE, GROUPED):
            weights.update(self.source(layout))
        first, *others = kernels.written
        assert len(first) == (4 if iso_weight else 8)
        for other in others:
            assert all(one is two for one, two in zip(first, other, strict=True))

    def test_other_sizes_get_others(self, kernels):
        weights = gpu.QuantizedWeights()
        weights.update(self.source(NATIVE))
        weights.update(self.source(NATIVE, experts=3))
        first, second = kernels.written
        assert not any(one is two for one, two in zip(first, second, strict=True))
