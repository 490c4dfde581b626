"""Engine weights that a later forward reads, or that lie elsewhere, before a backward; what a node is
pickled with; and copies of weights, the Hopper engine's buffers among them. test_stale_weights.py has
when they are made again.
"""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, torch
from functional.following import Following
from node.node_harness import ARRANGEMENTS, Layer, make_problem
from node.node_harness import FP8 as FP8_CONFIG
from weights.freed_memory import free
from weights.weight_sources import SOURCES, SWIGLU, fused_weights, per_expert_source, weight_arrays

from sonicmoe.engine.expert_matrices import ExpertMatrices
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineWeights
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.errors import LayoutError
from sonicmoe.interop import data_ptr
from sonicmoe.layer.bound import BoundLayer
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import dequantize
from sonicmoe.weights.copies import WeightCopies
from sonicmoe.weights.parameters import NumberedParameters
from sonicmoe.weights.stacked import FusedParameters

PLAIN = EngineSettings()
FP8 = EngineSettings(recipe=RECIPES["dx256"])
ISO = replace(FP8, iso_weight=True)
pytorch_only = pytest.mark.skipif(IS_PADDLE, reason="a trace that PyTorch leaves")


def write_twice_as_large(weights, weight):
    """In place, as an optimizer does."""
    with torch.no_grad():
        weight.copy_(2 * weight)


def write_and_announce(weights, weight):
    write_twice_as_large(weights, weight)
    weights.invalidate()


class TestBackwardsThatAreLate:
    """A forward is outstanding while the weights change and another forward reads them."""

    def scenario(self, engine, change):
        layer = per_expert_source(*weight_arrays())
        weights = BoundLayer(layer)
        early = weights.read(engine, FP8)
        change(weights, layer.parameters()[1])
        early.check_current()  # nothing has overwritten the old weights so far
        return early, weights.read(engine, FP8)

    @pytorch_only
    @pytest.mark.parametrize("change", [write_twice_as_large, write_and_announce])
    def test_overwritten_weights_are_refused(self, change):
        early, late = self.scenario(Following(), change)
        with pytest.raises(RuntimeError, match="read by another forward, between this forward and"):
            early.check_current()
        late.check_current()

    @pytest.mark.parametrize("keeps", [False, True])
    def test_an_engine_that_kept_the_old_ones_has_them(self, keeps, request):
        if keeps:
            request.getfixturevalue("weights_on_a_gpu")
        early, late = self.scenario(ReferenceEngine(), write_twice_as_large)
        assert early.weights is not late.weights
        early.check_current()

    @pytorch_only
    @pytest.mark.usefixtures("weights_on_a_gpu")
    def test_memory_that_the_engine_reads_where_it_lies_must_not_be_written(self):
        layer = SOURCES["native"](*weight_arrays())
        reading = BoundLayer(layer).read(ReferenceEngine(), PLAIN)
        reading.check_current()
        write_twice_as_large(None, layer.parameters()[1])
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*where they lie"):
            reading.check_current()

    @pytorch_only
    @pytest.mark.usefixtures("weights_on_a_gpu")
    @pytest.mark.parametrize("through_autograd", [False, True])
    def test_memory_that_was_gathered_elsewhere_is_found(self, through_autograd):
        """Megatron-FSDP: other memory for a weight, whose former memory another layer has now."""
        modules = torch.nn.Module(), torch.nn.Module()
        for module, shape in zip(modules, ((8, 4), (4, 4)), strict=True):
            module.weight0 = torch.nn.Parameter(torch.randn(shape))
        options = {"through_autograd": through_autograd}
        weights = BoundLayer(NumberedParameters(*modules, (1, 4, 4), SWIGLU, **options))
        engine = ReferenceEngine()

        def refresh(source, *_):
            return EngineWeights(*map(ExpertMatrices, (source.up, source.down) * 2))

        engine.refresh = refresh
        reading = weights.read(engine, PLAIN)
        held, former = reading.weights, reading.weights.w1.addresses
        own = modules[0].weight0
        values = own.detach().clone()
        own.data.fill_(float("nan"))
        own.data = values
        reading.check_current()
        assert reading.weights.w1.addresses == (data_ptr(values),) != former
        assert torch.equal(reading.weights.w1[0], values)
        assert held.w1.addresses == former  # a key of the cache has those


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_node_is_pickled_without_what_it_prepared(arrangement):
    """Its forward ran in FP8, and no framework can pickle those codes. node/test_copies_of_everything.py has what
    copies compute.
    """
    layer = Layer(make_problem(), arrangement=arrangement, config=FP8_CONFIG)
    layer.call()
    size = len(pickle.dumps(layer.node))
    layer.node._state.bound.drop()
    assert len(pickle.dumps(layer.node)) == size


# Copies, whose parameters may be freed; tests/node/test_node_copies.py has their life through a node.


def make_layer():
    arrays = weight_arrays(hidden=32, intermediate=64)
    return FusedParameters(*fused_weights(*arrays, torch.bfloat16), SWIGLU)


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
