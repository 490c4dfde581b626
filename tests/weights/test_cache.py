"""The cache of a node's engine weights: neither stale nor rebuilt while nothing changes."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from node.node_harness import ARRANGEMENTS, Layer, make_problem
from node.node_harness import FP8 as FP8_CONFIG
from weights.weight_sources import SOURCES, SWIGLU, expert_modules, per_expert_source, weight_arrays

from sonicmoe.engine.interface import Change, EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ZCode
from sonicmoe.interop import data_ptr
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.weights import changes
from sonicmoe.weights.cache import LayerWeights, Unannounced
from sonicmoe.weights.parameters import PerExpertParameters

PLAIN = EngineSettings()
FP8 = EngineSettings(recipe=RECIPES["dx256"])
each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


class CountingEngine(ReferenceEngine):
    def __init__(self):
        self.prepared = 0

    def prepare_weights(self, *arguments):
        self.prepared += 1
        return super().prepare_weights(*arguments)


class InPlaceEngine(ReferenceEngine):
    """Writes changed weights where the old ones lay, as a GPU engine does."""

    def refresh(self, source, settings, previous=None, change=Change.YES):
        return previous or super().refresh(source, settings)


def write(weight, array):
    """Change a parameter in place, as an optimizer does."""
    with torch.no_grad():
        weight.copy_(tensor(array, torch.float32).to(weight.dtype))


class TestCaches:
    @each_source
    @pytest.mark.parametrize("settings", [PLAIN, FP8], ids=["plain", "fp8"])
    def test_prepared_once_while_nothing_changes(self, make, settings):
        engine, weights = CountingEngine(), LayerWeights(make(*weight_arrays()))
        first = weights.read(engine, settings).weights
        assert all(weights.read(engine, settings).weights is first for _ in range(3))
        assert engine.prepared == 1

    @each_source
    def test_weights_are_described_only_for_an_engine_that_reads_them(self, make, monkeypatch):
        """Views of every expert's matrices take longer than a launch."""
        layer, described = make(*weight_arrays()), []
        source = layer.source
        monkeypatch.setattr(
            layer, "source", lambda *arguments: described.append(1) or source(*arguments)
        )
        engine, weights = CountingEngine(), LayerWeights(layer)
        for _ in range(3):
            weights.read(engine, FP8)
        assert len(described) == 1
        weights.invalidate()
        weights.read(engine, FP8)
        assert len(described) == 2 and engine.prepared == 2

    @each_source
    def test_a_changed_value_is_found_whatever_parameter_it_is_in(self, make):
        up_gate, down = weight_arrays()
        source = make(up_gate, down)
        engine, weights = CountingEngine(), LayerWeights(source)
        weights.read(engine, PLAIN)
        for count, weight in enumerate(source.parameters(), start=2):
            changed = numpy(weight)
            changed.ravel()[3] = np.float32(changed.ravel()[3] * 1.001)
            pointer = data_ptr(weight)
            write(weight, changed)
            assert data_ptr(weight) == pointer, "the test must change the weight in place"
            fresh = weights.read(engine, PLAIN).weights
            assert engine.prepared == count
            w1, w2 = source.native()
            assert np.array_equal(numpy(fresh.w1), numpy(w1))
            assert np.array_equal(numpy(fresh.w2), numpy(w2))

    def test_stale_weights_are_never_computed_with(self):
        source = per_expert_source(*weight_arrays())
        engine, weights = CountingEngine(), LayerWeights(source)
        old = numpy(weights.read(engine, PLAIN).weights.w2).copy()
        write(source.parameters()[-1], numpy(source.parameters()[-1]) * 2)
        new = numpy(weights.read(engine, PLAIN).weights.w2)
        np.testing.assert_array_equal(new[-1], 2 * old[-1])

    def test_a_new_pointer_is_found(self):
        up_gate, down = weight_arrays()
        modules = expert_modules(up_gate, down)
        engine, weights = (
            CountingEngine(),
            LayerWeights(PerExpertParameters(modules, 3, 16, 12, SWIGLU)),
        )
        weights.read(engine, PLAIN)
        kept = modules[1].down_proj.weight
        modules[1].down_proj.weight = parameter(np.float32(down[1]))
        assert data_ptr(modules[1].down_proj.weight) != data_ptr(kept)
        weights.read(engine, PLAIN)
        assert engine.prepared == 2

    def test_other_settings_are_found(self):
        engine, weights = CountingEngine(), LayerWeights(per_expert_source(*weight_arrays()))
        weights.read(engine, PLAIN)
        weights.read(engine, FP8)
        weights.read(engine, EngineSettings(recipe=RECIPES["1x128"]))
        assert engine.prepared == 3

    def test_settings_that_change_no_weight_share_them(self):
        engine, weights = CountingEngine(), LayerWeights(per_expert_source(*weight_arrays()))
        first = weights.read(engine, FP8).weights
        others = (
            EngineSettings(recipe=FP8.recipe, save_z=ZCode.E4M3, recompute_z=True),
            EngineSettings(recipe=FP8.recipe, fp8_wgrad=False, frees_stagewise=True),
        )
        assert all(weights.read(engine, other).weights is first for other in others)
        assert engine.prepared == 1

    def test_invalidate(self):
        engine, weights = CountingEngine(), LayerWeights(per_expert_source(*weight_arrays()))
        first = weights.read(engine, FP8).weights
        weights.invalidate()
        assert weights.read(engine, FP8).weights is not first
        assert engine.prepared == 2

    @pytest.mark.parametrize("announced", [False, True])
    def test_a_write_that_nobody_announced_is_told_once(self, announced):
        source = per_expert_source(*weight_arrays())
        weights = LayerWeights(source)
        assert weights.read(ReferenceEngine(), PLAIN).unannounced is None
        write(source.parameters()[0], numpy(source.parameters()[0]) * 2)
        if announced:
            weights.invalidate()
        found = weights.read(ReferenceEngine(), PLAIN).unannounced
        assert found is (None if announced else Unannounced.WRITE)
        assert weights.read(ReferenceEngine(), PLAIN).unannounced is None


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_node_is_pickled_without_what_it_prepared(arrangement):
    """After a forward in FP8, whose codes no framework can pickle."""
    layer = Layer(make_problem(), arrangement=arrangement, config=FP8_CONFIG)
    expected = numpy(layer.call().out)
    size = len(pickle.dumps(layer.node))
    layer.node.drop_caches()
    assert len(pickle.dumps(layer.node)) == size
    for duplicate in (pickle.loads(pickle.dumps(layer.node)), copy.deepcopy(layer.node)):
        layer.node = duplicate
        assert np.array_equal(numpy(layer.call().out), expected)


class TestBackwardsThatAreLate:
    """A forward is outstanding while the weights change and another forward reads them."""

    def scenario(self, engine, change):
        source = per_expert_source(*weight_arrays())
        weights = LayerWeights(source)
        early = weights.read(engine, FP8)
        change(weights, source.parameters()[1])
        early.check_current()  # nothing has overwritten the old weights so far
        return early, weights.read(engine, FP8)

    def double(self, weights, weight):
        write(weight, 2 * numpy(weight))

    def double_and_step(self, weights, weight):
        self.double(weights, weight)
        weights.invalidate()

    @pytest.mark.parametrize("change", ["double", "double_and_step"])
    def test_overwritten_weights_are_refused(self, change):
        early, late = self.scenario(InPlaceEngine(), getattr(self, change))
        with pytest.raises(
            RuntimeError, match="read by another forward, between this forward and its backward"
        ):
            early.check_current()
        late.check_current()

    def test_a_step_without_a_change_is_none(self):
        early, _ = self.scenario(InPlaceEngine(), lambda weights, weight: weights.invalidate())
        early.check_current()

    def test_an_engine_that_kept_the_old_ones_has_them(self):
        early, late = self.scenario(ReferenceEngine(), self.double)
        assert early.weights is not late.weights
        early.check_current()


class TestOnAGpu:
    """Where checksums would wait for the device: version counters, optimizer steps, and what is
    left under Paddle.
    """

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        monkeypatch.setattr(changes, "is_cuda", lambda tensor: True)

    def prepared_twice(self, change, engine=None):
        engine, source = engine or CountingEngine(), per_expert_source(*weight_arrays())
        weights = LayerWeights(source)
        weights.read(engine, PLAIN)
        change(source.parameters())
        weights.read(engine, PLAIN)
        return engine.prepared

    def test_without_a_change_nothing_is_made_anew(self):
        assert self.prepared_twice(lambda parameters: None) == 1

    @pytest.mark.skipif(IS_PADDLE, reason="Paddle has no version counters that count")
    @pytest.mark.parametrize("fused", [False, True])
    def test_an_optimizer_step_is_seen(self, fused):
        """Fused optimizers move no version counter."""

        def step(parameters):
            for weight in parameters:
                weight.grad = torch.ones_like(weight)
            torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()

        assert self.prepared_twice(step) == 2

    @pytest.mark.skipif(IS_PADDLE, reason="a hook of PyTorch's optimizers")
    def test_an_optimizer_step_that_nobody_announced_is_told(self):
        """Of any parameters: a fused optimizer may have written these without a trace."""
        weights = LayerWeights(per_expert_source(*weight_arrays()))
        weights.read(ReferenceEngine(), PLAIN)
        other = torch.nn.Parameter(torch.zeros(1))
        other.grad = torch.ones(1)
        torch.optim.AdamW([other], fused=True).step()
        found = weights.read(ReferenceEngine(), PLAIN).unannounced
        assert found is Unannounced.OPTIMIZER_STEP

    @pytest.mark.parametrize("in_place", [False, True])
    def test_what_leaves_no_trace_is_seen_by_an_engine_that_looks_itself(self, in_place):
        class Looking(ReferenceEngine):
            def refresh(self, *arguments):
                return dataclasses.replace(super().refresh(*arguments), store=in_place or None)

        weights = LayerWeights(per_expert_source(*weight_arrays()))
        weights.read(Looking(), PLAIN)
        assert weights.sees_writes == (in_place or not IS_PADDLE)

    @pytest.mark.skipif(not IS_PADDLE, reason="elsewhere changes show")
    def test_paddle_trusts_nothing_without_gradients(self):
        engine, weights = CountingEngine(), LayerWeights(per_expert_source(*weight_arrays()))
        for _ in range(2):
            weights.read(engine, PLAIN)
        assert engine.prepared == 1
        with torch.no_grad():
            for _ in range(2):
                weights.read(engine, PLAIN)
        assert engine.prepared == 3
