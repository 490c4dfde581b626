"""Codes of weights on engine `hopper`, whose passes reach kernels on the host, in one order or two."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from engine.hopper_host import OURS, host_passes, native_fixture  # noqa: F401
from pairwise import pairwise
from torch.utils.checkpoint import checkpoint

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.select import EngineChoice
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.functional.routed import ExpertGroup, name_of, routed_mlp
from sonicmoe.layer import bound, plan
from sonicmoe.layouts import NATIVE
from sonicmoe.quant.gpu import QuantizedWeights
from sonicmoe.weights import cache, stacked_cache
from sonicmoe.weights.stacked_cache import _beside, _owner

E, K, T, H, I = 4, 2, 70, 144, 64
FP8 = SonicMoEConfig(fp8_mode="perf")


@pytest.fixture
def ours(monkeypatch):
    """The engine of every face, which keeps its codes as on a device that finds no write."""
    monkeypatch.setattr(plan, "ready_engine", lambda *_: EngineChoice(OURS, "a test"))
    monkeypatch.setattr(QuantizedWeights, "keep", lambda _, w1, force=False: not force)


class Layer:
    """Calls on one set of weights, of the function or of a node."""

    def __init__(self, face):
        made = torch.Generator().manual_seed(0)
        w1, w2 = (torch.randn(s, generator=made) * 0.1 for s in ((E, 2 * I, H), (E, H, I)))
        self.weights = [torch.nn.Parameter(weight.bfloat16()) for weight in (w1, w2)]
        self.x = torch.randn(T, H, generator=made).bfloat16().requires_grad_()
        ids = torch.rand(T, E, generator=made).topk(K, 1).indices
        probs = torch.rand(T, K, generator=made)
        self.routes = ids, probs
        if face == "node":
            node = SonicMoEMlpNode.from_native(*self.weights, config=FP8)
            self.experts = lambda x: node(x, None, ids, probs)
            self.kept = lambda: node._state.bound._prepared.weights
            self.prepare = node.prequantize_weights
        else:
            given = ids, probs, *self.weights, None, None, ActivationType.SWIGLU
            self.experts = lambda x: expert_mlp(x, *given, use_fp8=True)

    def __call__(self, x):
        return self.experts(x)

    def step(self, run=None, writes=True):
        """Gradients under a wrapper of the forward, and then a write."""
        (run or self)(self.x).float().square().sum().backward()
        found = [leaf.grad for leaf in (self.x, *self.weights)]
        for leaf in (self.x, *self.weights):
            leaf.grad = None
        if writes:
            with torch.no_grad():
                torch._foreach_mul_(self.weights, 0.9)
        return found

    def kept(self):
        return next(iter(_beside[id(_owner(self.weights[0]))].entries.values())).prepared.weights


@pytest.mark.parametrize(
    ("way", "face", "adds"),
    pairwise(
        ["checkpointed", "reentrant", "compiled"],
        ["function", "node"],
        ["a backward of its own", "a second backward"],
    ),
)
def test_the_other_order_is_made_by_each_backward(way, face, adds, ours):
    """To the same bits. A forward that has a backward of its own adds it in the same store, for good,
    and so does a second backward of the same weights.
    """
    layer, wanted = Layer(face), Layer(face)
    torch._dynamo.reset()
    called = torch.compile(layer, backend="aot_eager") if way == "compiled" else layer
    run = partial(checkpoint, called, use_reentrant=way == "reentrant")
    with torch.no_grad():
        layer(layer.x)
    store, alone = layer.kept().store, adds == "a backward of its own"
    steps = [(run, True, 1), (run, alone, 1), (None if alone else run, True, 2), (run, True, 2)]
    for again, writes, orders in steps:
        assert all(map(torch.equal, layer.step(again, writes), wanted.step(None, writes)))
        assert layer.kept().store is store and layer.kept().two_orders is (orders == 2)
        assert store.nbytes * 2 == wanted.kept().store.nbytes * orders


def test_codes_that_are_made_ahead_are_those_of_the_step(ours, monkeypatch):
    """In both orders, also where gradients are off, as inside a dispatch; and the forward finds them
    bound.
    """
    read, reads = cache.PreparedWeights.read, []
    counted = lambda *given, **options: reads.append(1) or read(*given, **options)  # noqa: E731
    monkeypatch.setattr(cache.PreparedWeights, "read", counted)
    layer, wanted = Layer("node"), Layer("node")
    result = wanted.step(writes=False)
    reads.clear()
    with torch.no_grad():
        layer.prepare()
    assert layer.kept().two_orders and reads == [1]
    assert all(map(torch.equal, layer.step(writes=False), result)) and reads == [1]


def routed_as(layer):
    """The same call through the operator of the routed path."""
    with FP8.activate():
        made = replace(plan.make_plan(ActivationType.SWIGLU, NATIVE, None), is_own=True)
    place = plan.number_of(made), name_of(ExpertGroup(E, None))
    return lambda x: routed_mlp(*place, x, *layer.routes, (*layer.weights, None, None))


@pytest.mark.parametrize("way", ["compiled", "routed", "routed again"])
def test_an_operator_under_fully_shard_makes_what_each_pass_reads(way, ours, monkeypatch):
    """Nothing is kept between the passes, so the forward makes one order, and the backward both. A
    dispatch inside the backward makes them, and the codes wait for the few moments.
    """
    layer, wanted, read = Layer("function"), Layer("function"), []
    monkeypatch.setattr(stacked_cache, "_FSDP", "sys")
    monkeypatch.setattr(stacked_cache, "_any_module_is_sharded", lambda: True)
    result = wanted.step()
    original = type(OURS).read_stacked

    def recorded(engine, weights, layout, dtype, settings):
        read.append("one" if settings.iso_weight else "two")
        return original(engine, weights, layout, dtype, settings)

    monkeypatch.setattr(type(OURS), "read_stacked", recorded)
    torch._dynamo.reset()
    call = layer if way == "compiled" else routed_as(layer)
    call = torch.compile(call, backend="aot_eager") if way == "compiled" else call
    call = partial(checkpoint, call, use_reentrant=False) if way == "routed again" else call
    assert all(map(torch.equal, layer.step(call), result))
    assert read == ["one", "two"]


@pytest.mark.parametrize("face", ["function", "node"])
def test_a_graph_adds_no_order_and_has_codes_of_its_own(face, ours, monkeypatch):
    """Else its replay would hide a write from those who read both orders."""
    layer = Layer(face)
    with monkeypatch.context() as capture, torch.no_grad():
        for module in (cache, stacked_cache, bound):
            capture.setattr(module, "is_capturing", lambda _: True)
        layer(layer.x)
        with torch.enable_grad():
            layer(layer.x)
    of_graph = layer.kept()
    assert not of_graph.two_orders
    layer.step()
    assert layer.kept().two_orders and layer.kept().store is not of_graph.store
    assert not of_graph.two_orders
