"""Engine weights of the functional API and `MoE`: whose the codes are that an engine keeps, and how long.
weights/test_stale_weights.py has the events that make them anew.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from framework import torch
from functional.following import Following
from functional.layer_golden import (
    FP8,
    MODES,
    batch,
    make_layer,
    make_tokens,
    run_layer,
    views,
)
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe import SonicMoEConfig, moe_TC_softmax_topk_layer
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.layer.plan import Plan
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES, iso
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.weights import cache, stacked_cache
from sonicmoe.weights.stacked_cache import _beside, _owner, read_weights

SETTINGS = EngineSettings(recipe=RECIPES["dx256"])


def kept_of(weight):
    beside = _beside.get(id(_owner(weight)))
    return {} if beside is None else beside.entries


@pytest.fixture
def following(monkeypatch):
    """Every call goes to one `Following` engine."""
    engine = Following()
    monkeypatch.setattr(Plan, "chosen", property(lambda _: engine, lambda *_: None))
    return engine


@pytest.fixture
def moe():
    return make_layer()


@pytest.fixture
def x():
    return make_tokens(19, 32)


def write(weight):
    """As PyTorch's in-place operations do."""
    with torch.no_grad():
        weight.mul_(-1.5)


def kept_codes(moe):
    """A weak reference to the codes of its only entry."""
    (kept,) = kept_of(moe.c_fc.weight).values()
    return weakref.ref(kept.prepared.weights.w1.codes)


def without_cache(moe, x):
    """The output of a layer with the same parameters that has prepared nothing yet."""
    fresh = make_layer(seed=99)
    fresh.load_state_dict(moe.state_dict())
    return module(fresh, x)


def read(engine, w1, w2, settings=SETTINGS):
    weights = (w1, w2, None, None)
    return read_weights(engine, weights, settings, WeightLayout(), torch.bfloat16).weights


def module(moe, x):
    return moe(x, use_fp8=True)[0]


def whole_layer(moe, x):
    given = x, moe.router.weight, *views(moe), moe.top_k, None
    return moe_TC_softmax_topk_layer(*given, use_fp8=True)[0]


class TestKeptCodes:
    """Of an engine that looks for writes."""

    def test_made_once(self, following):
        """In inference mode, and used in training; the other way round too."""
        moe, (x, dout) = make_layer(), batch()
        with torch.inference_mode():
            moe(x, **FP8)
        run_layer(moe, x, dout, **FP8)
        moe.eval()(x, **FP8)
        with torch.inference_mode():
            moe(x, **FP8)
        assert following.events == ["made"]

    def test_in_a_compiled_graph(self, following, moe, x):
        torch._dynamo.reset()
        graph = torch.compile(lambda x: whole_layer(moe, x), fullgraph=True, backend="aot_eager")
        for _ in range(3):
            graph(x).square().sum().backward()
        assert following.events == ["made"]
        write(moe.c_fc.weight)
        assert torch.equal(graph(x), module(moe, x))
        assert following.events == ["made", "remade"]

    @pytest.mark.parametrize("how", ["swap_tensors", "to"])
    def test_swapped_parameters(self, how, following, moe, x, monkeypatch):
        """`torch.utils.swap_tensors` refuses tensors that somebody refers to weakly."""
        other = make_layer(seed=7)
        moe(x, **FP8)
        codes = kept_codes(moe)
        monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
        if how == "swap_tensors":
            for name, parameter in other.named_parameters():
                torch.utils.swap_tensors(moe.get_parameter(name), parameter)
        else:
            moe.to(torch.bfloat16)
            moe.to(torch.float32)
        del other
        gc.collect()
        assert codes() is None
        assert torch.equal(moe(x, **FP8)[0], without_cache(moe, x))

    def test_a_switch_of_the_precision_drops_them(self, following, moe, x):
        moe(x, **FP8)
        assert len(kept_of(moe.c_fc.weight)) == 1
        read(ReferenceEngine(), moe.c_fc.weight, moe.c_proj.weight, EngineSettings())
        assert not kept_of(moe.c_fc.weight)

    @pytest.mark.parametrize("face", [module, whole_layer])
    def test_they_die_with_the_parameter(self, face, following, x):
        moe = make_layer()
        face(moe, x).square().sum().backward()
        codes, memory = kept_codes(moe), weakref.ref(moe.c_fc.weight)
        assert codes() is not None
        del moe
        gc.collect()
        assert codes() is None and memory() is None

    def test_they_are_not_stored(self, following, moe, x):
        size = len(pickle.dumps(moe))
        moe(x, **FP8)
        assert len(pickle.dumps(moe)) == size
        assert id(_owner(copy.deepcopy(moe).c_fc.weight)) not in _beside
        assert set(moe.state_dict()) == {name for name, _ in moe.named_parameters()}


class TestWhoseTheyAre:
    """Another place, another entry; and none for memory that was freed."""

    @pytest.mark.parametrize("name", ["c_fc", "c_proj"])
    def test_memory_given_again_gets_buffers_of_its_own(self, name, following, moe, x):
        """Address and version are those of weights whose outstanding forward has still to read its
        codes.
        """
        weight, following.is_blind = moe.get_parameter(f"{name}.weight"), True
        block = weight.detach().numpy().copy()
        weight.data = torch.from_numpy(block)
        first, *_ = [module(moe, x) for _ in range(3)]
        weight.data = torch.empty(0)
        np.multiply(block, -1.5, out=block)
        weight.data = torch.from_numpy(block)
        assert torch.equal(module(moe, x), without_cache(moe, x))
        assert following.events == ["made", "made", "made"]
        first.sum().backward()

    def test_parts_of_a_tensor_that_counts_no_writes_share_nothing(self):
        """As the local parts of a DTensor: each call has a view of its own."""
        engine, whole, w2 = Following(), torch.randn(2, 128, 32), torch.randn(2, 32, 64)
        engine.is_blind = True
        early, late = whole[:], whole[:]
        first = read(engine, early, w2)
        assert read(engine, late, w2) is not first and read(engine, early, w2) is first
        assert engine.events == ["made", "made"]

    def test_the_youngest_at_an_address_is_found_first(self):
        engine, other = Following(), EngineSettings(recipe=RECIPES["1x128"])
        w1, w2 = torch.nn.Parameter(torch.randn(2, 128, 32)), torch.randn(2, 32, 64)
        for settings in (SETTINGS, other, SETTINGS, other):
            read(engine, w1, w2, settings)
        (last,) = kept_of(w1).values()
        assert last.place[1] is other and engine.events == 4 * ["made"]
        del w1
        assert last.is_dead()

    def test_every_layer_of_one_flat_buffer_has_its_own_entry(self):
        """All parameters of a model as views of one tensor, as some optimizers keep them."""
        flat = torch.nn.Parameter(torch.randn(4, 2, 128, 32))
        downs = [torch.nn.Parameter(torch.randn(2, 32, 64)) for _ in range(4)]
        engine = Following()
        first = [read(engine, flat[i], downs[i]) for i in range(4)]
        before = [dequantize(weights.w1) for weights in first]
        assert [read(engine, flat[i], downs[i]) for i in range(4)] == first
        with torch.no_grad():
            flat[2].mul_(-2)  # one version counter for all: everything is made again
        again = [read(engine, flat[i], downs[i]) for i in range(4)]
        assert again == first and engine.events == 4 * ["made"] + 4 * ["remade"]
        assert torch.equal(dequantize(again[2].w1), -2 * before[2])
        assert torch.equal(dequantize(again[1].w1), before[1])

    def test_overlapping_views_do_not_pile_up(self):
        buffer, w2 = torch.nn.Parameter(torch.randn(40, 128, 32)), torch.randn(2, 32, 64)
        engine = Following()
        for start in range(38):
            part = buffer[start : start + 2]
            assert torch.allclose(dequantize(read(engine, part, w2).w1), part.detach(), atol=0.3)
        assert len(kept_of(buffer)) == 20, "as many as fit side by side"

    def test_strides_are_part_of_what_a_weight_is(self):
        """A square matrix and its transpose share address, shape and version."""
        engine, w1, w2 = Following(), torch.randn(2, 128, 64), torch.randn(2, 64, 64)
        assert torch.equal(
            dequantize(read(engine, w1, w2.mT).w2), dequantize(read(engine, w1, w2).w2).mT
        )

    def test_another_down_projection_gets_buffers_of_its_own(self):
        """The second forward must not overwrite what the first one's backward reads."""
        engine, generator = HopperEngine(), torch.Generator().manual_seed(0)
        shapes = (2, 128, 32), (2, 32, 64), (2, 32, 64)
        w1, w2, other = (
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )
        first = read(engine, w1, w2)
        assert read(engine, w1, w2).store is first.store
        assert read(engine, w1, other).store is not first.store
        assert torch.equal(dequantize(first.w2), dequantize(quantize(w2.detach(), iso(128))))
        with torch.inference_mode():
            anonymous = torch.ones(2, 128, 32), torch.ones(2, 32, 64)
        read(engine, *anonymous)
        assert id(_owner(anonymous[0])) not in _beside

    def test_a_graph_keeps_what_it_reads(self, following, monkeypatch, x):
        """A captured graph holds addresses only: other settings for the same weights must not free
        its buffers.
        """
        moe, following.is_blind = make_layer(), True
        for _ in range(3):
            whole_layer(moe, x)
        codes = kept_codes(moe)
        with monkeypatch.context() as capture:
            for module_ in (cache, stacked_cache):
                capture.setattr(module_, "is_capturing", lambda _: True)
            whole_layer(moe, x)
        with SonicMoEConfig(fp8_mode="perf", save_z="e4m3").activate():
            moe(x)
        gc.collect()
        assert following.events == ["made", "made"] and codes() is not None
        del moe
        gc.collect()
        assert codes() is None


@MODES
def test_layer_made_in_inference_mode(options):
    """Inference tensors have no version counter: writes must be seen all the same."""
    x, _ = batch()
    expected = make_layer(bias=True)
    with torch.inference_mode():
        moe = make_layer(bias=True)
        assert torch.equal(moe(x, **options)[0], expected(x, **options)[0])
        write(moe.c_proj.weight)
        after = moe(x, **options)[0]
    write(expected.c_proj.weight)
    assert torch.equal(after, expected(x, **options)[0])


def converted(moe):
    """Stands for a move to another device."""
    moe.to(torch.bfloat16)


def let_go(moe):
    """As offloading and sharding by hand do."""
    for parameter in moe.parameters():
        parameter.data = torch.empty(0)


@pytest.mark.parametrize("follows", [True, False])
@MODES
@pytest.mark.parametrize("leave", [converted, let_go])
def test_weights_that_a_model_left_are_freed_at_once(leave, options, follows, request):
    if follows and options:
        request.getfixturevalue("following")
    moe, (x, dout) = make_layer(), batch()
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in moe.parameters()]
    run_layer(moe, x, dout, **options)
    with torch.no_grad():
        moe(x, **options)
    assert not any(storage.expired() for storage in memory)
    assert bool(kept_of(moe.c_fc.weight)) == bool(follows and options)
    leave(moe)
    assert all(storage.expired() for storage in memory)
