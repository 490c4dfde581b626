"""When a node's engine weights are made again, of parameters in every arrangement, in both
frameworks. test_stale_weights.py has the tables of docs/design.md.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import ARRANGEMENTS, Layer, make_problem
from node.node_harness import FP8 as FP8_CONFIG
from weights.weight_sources import SOURCES, SWIGLU, per_expert_source, weight_arrays

from sonicmoe.engine.expert_matrices import ExpertMatrices
from sonicmoe.engine.interface import EngineWeights
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ZCode
from sonicmoe.interop import data_ptr
from sonicmoe.layer.bound import BoundLayer
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.weights.parameters import NumberedParameters

PLAIN = EngineSettings()
FP8 = EngineSettings(recipe=RECIPES["dx256"])
each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
pytorch_only = pytest.mark.skipif(IS_PADDLE, reason="a trace that PyTorch leaves")


class CountingEngine(ReferenceEngine):
    def __init__(self):
        self.prepared = 0

    def prepare_weights(self, *arguments):
        self.prepared += 1
        return super().prepare_weights(*arguments)


class LookingEngine(ReferenceEngine):
    """Looks for writes itself and updates its weights in place, as `hopper` does on its device."""

    def __init__(self):
        self.looks, self.told = 0, []

    def keep(self, previous, written=False):
        self.looks += not written
        return not written

    def refresh(self, source, settings, previous=None, written=True):
        self.told.append(written)
        return previous or dataclasses.replace(super().refresh(source, settings), store=True)


def write(weight, array):
    """Change a parameter in place, as an optimizer does."""
    with torch.no_grad():
        weight.copy_(tensor(array, torch.float32).to(weight.dtype))


def kept(layer):
    """`(engine, weights)`, prepared and kept."""
    engine, weights = CountingEngine(), BoundLayer(layer)
    weights.invalidate()  # under Paddle nothing is kept before the first announcement
    weights.read(engine, FP8)
    weights.read(engine, FP8)
    assert engine.prepared == 1
    return engine, weights


def step_of(fused):
    def step(weights, parameters):
        for weight in parameters:
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()

    return step


def another_step(weights, parameters):
    """Of any parameters: a fused optimizer may have written these without a trace."""
    other = torch.nn.Parameter(torch.zeros(1))
    step_of(True)(weights, [other])


EVENTS = {
    "announced": lambda weights, parameters: weights.invalidate(),
    "dropped": lambda weights, parameters: weights.drop(),
    **(
        {}
        if IS_PADDLE
        else {
            "written": lambda weights, parameters: write(parameters[-1], numpy(parameters[-1]) * 2),
            "optimizer": step_of(False),
            "fused optimizer": step_of(True),
            "another model's optimizer": another_step,
        }
    ),
}


@pytest.mark.usefixtures("weights_on_a_gpu")
class TestEvents:
    """On a GPU, with an engine that does not look at the device."""

    @each_source
    @pytest.mark.parametrize("event", EVENTS)
    def test_prepares_again_once(self, make, event):
        layer = make(*weight_arrays())
        engine, weights = kept(layer)
        EVENTS[event](weights, layer.parameters())
        fresh = weights.read(engine, FP8).weights
        assert weights.read(engine, FP8).weights is fresh and engine.prepared == 2

    def test_settings_that_change_no_weight_share_them(self):
        engine, weights = kept(per_expert_source(*weight_arrays()))
        for other in (
            EngineSettings(recipe=FP8.recipe, save_z=ZCode.E4M3, recompute_z=True),
            EngineSettings(recipe=FP8.recipe, fp8_wgrad=False, frees_stagewise=True),
        ):
            weights.read(engine, other)
        assert engine.prepared == 1


class TestOnAHost:
    """The engine prepares in every forward, whatever anybody announces."""

    @each_source
    @pytest.mark.parametrize("settings", [PLAIN, FP8], ids=["plain", "fp8"])
    def test_a_write_without_an_announcement_is_computed_with(self, make, settings):
        layer, engine = make(*weight_arrays()), ReferenceEngine()
        weights = BoundLayer(layer)
        weights.read(engine, settings)
        for weight in layer.parameters():
            address, changed = data_ptr(weight), numpy(weight)
            changed.ravel()[3] *= 1.5
            if IS_PADDLE:
                write(weight, changed)
            else:
                weight.data.copy_(tensor(changed, weight.dtype))  # moves no version counter
            assert data_ptr(weight) == address, "the test must change the weight in place"
            found = weights.read(engine, settings).values()
            wanted = BoundLayer(layer).read(engine, settings).values()
            assert all(map(np.array_equal, map(numpy, found), map(numpy, wanted)))

    def test_nothing_is_held_between_forwards(self):
        weights = BoundLayer(per_expert_source(*weight_arrays()))
        weights.read(ReferenceEngine(), FP8)
        assert weights._prepared.weights is None


class TestAnEngineThatLooks:
    """It is asked in every forward, and quantises whatever it finds where the host knows better."""

    def test_is_asked_at_every_forward(self):
        engine, weights = LookingEngine(), BoundLayer(per_expert_source(*weight_arrays()))
        first = weights.read(engine, FP8).weights
        assert all(weights.read(engine, FP8).weights is first for _ in range(3))
        assert (engine.looks, engine.told) == (3, [True])

    @pytest.mark.parametrize(
        "event", ["announced", *([] if IS_PADDLE else ["written", "optimizer"])]
    )
    def test_is_told_of_an_event(self, event):
        layer = per_expert_source(*weight_arrays())
        engine, weights = LookingEngine(), BoundLayer(layer)
        first = weights.read(engine, FP8).weights
        EVENTS[event](weights, layer.parameters())
        assert weights.read(engine, FP8).weights is first
        assert (engine.looks, engine.told) == (0, [True, True])

    def test_that_cannot_look_is_shown_the_weights(self):
        """As where it read a copy of them."""
        engine, weights = LookingEngine(), BoundLayer(per_expert_source(*weight_arrays()))
        engine.keep = lambda *_: False
        for _ in range(2):
            weights.read(engine, FP8)
        assert engine.told == [True, False]


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
    @pytest.mark.parametrize("announced", [False, True])
    def test_overwritten_weights_are_refused(self, announced):
        def change(weights, weight):
            write(weight, 2 * numpy(weight))
            if announced:
                weights.invalidate()

        early, late = self.scenario(LookingEngine(), change)
        with pytest.raises(RuntimeError, match="read by another forward, between this forward and"):
            early.check_current()
        late.check_current()

    @pytest.mark.parametrize("keeps", [False, True])
    def test_an_engine_that_kept_the_old_ones_has_them(self, keeps, request):
        if keeps:
            request.getfixturevalue("weights_on_a_gpu")
        change = lambda weights, weight: write(weight, 2 * numpy(weight))  # noqa: E731
        early, late = self.scenario(ReferenceEngine(), change)
        assert early.weights is not late.weights
        early.check_current()

    @pytorch_only
    @pytest.mark.usefixtures("weights_on_a_gpu")
    def test_memory_that_the_engine_reads_where_it_lies_must_not_be_written(self):
        layer = SOURCES["native"](*weight_arrays())
        reading = BoundLayer(layer).read(ReferenceEngine(), PLAIN)
        reading.check_current()
        write(layer.parameters()[1], 2 * numpy(layer.parameters()[1]))
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
    """After a forward in FP8, whose codes no framework can pickle."""
    layer = Layer(make_problem(), arrangement=arrangement, config=FP8_CONFIG)
    expected = numpy(layer.call().out)
    size = len(pickle.dumps(layer.node))
    layer.node._state.bound.drop()
    assert len(pickle.dumps(layer.node)) == size
    for duplicate in (pickle.loads(pickle.dumps(layer.node)), copy.deepcopy(layer.node)):
        layer.node = duplicate
        assert np.array_equal(numpy(layer.call().out), expected)
