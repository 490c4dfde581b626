"""The routed path as one operator: what it computes, and what becomes of what a forward keeps. One
rank; tests/ep has worlds.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from framework import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sonicmoe import SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.ep.dispatcher import LocalTransport
from sonicmoe.errors import RankLostError
from sonicmoe.functional import routed
from sonicmoe.functional.autograd import planned_mlp
from sonicmoe.functional.routed import ExpertGroup, name_of, routed_mlp
from sonicmoe.layer import passed_call
from sonicmoe.layer.plan import make_plan, number_of
from sonicmoe.layouts import NATIVE

EXPERTS, TOPK, TOKENS, HIDDEN, INNER = 4, 2, 24, 32, 16
COUNTS = [3, 0, 14, 5]  # of sorted rows; two are nobody's
MODES = pytest.mark.parametrize("fp8_mode", ["off", "perf"])


def plan_of(fp8_mode):
    with SonicMoEConfig(fp8_mode=fp8_mode).activate():
        made = make_plan(ActivationType.SWIGLU, NATIVE, None)
    return replace(made, is_own=True)


class Layer:
    """Leaves of a layer with biases, whose tokens choose also experts that are nowhere."""

    def __init__(self, fp8_mode, **options):
        torch.manual_seed(0)
        self.plan = plan_of(fp8_mode)
        self.number, self.group = number_of(self.plan), name_of(ExpertGroup(EXPERTS, None, options))
        scores, self.ids = torch.rand(TOKENS, EXPERTS).topk(TOPK)
        self.ids[3] = -1
        shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
        shapes = *shapes, (EXPERTS, 2 * INNER), (EXPERTS, HIDDEN)
        weights = [torch.randn(shape).mul_(0.3) for shape in shapes]
        x, self.dout = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
        given = [tensor.bfloat16() for tensor in (x, *weights)]
        self.leaves = [leaf.requires_grad_() for leaf in (given[0], scores, *given[1:])]
        self.dout = self.dout.bfloat16()

    def routed(self, x, probs, *weights):
        return routed_mlp(self.number, self.group, x, self.ids, probs, weights)

    def experts(self, x, probs, *weights):
        return planned_mlp(
            routed.plan_of(self.number), self.number, x, self.ids, probs, weights, None
        )

    def sorted(self, x, probs, *weights, counts=COUNTS):
        """Rows in expert order; probs `[T]`, or None."""
        routes = torch.tensor(counts)
        return planned_mlp(self.plan, self.number, x, routes, probs, weights, None)

    def results(self, call):
        """Output and gradients."""
        out = call(*self.leaves)
        return [out.detach().clone(), *torch.autograd.grad(out, self.leaves, self.dout)]


def again(call):
    return lambda *leaves: checkpoint(call, *leaves, use_reentrant=False)


def kept(call, names=("routed_dispatch", "routed_mlp")):
    """Under selective checkpointing that names the operators."""
    ours = [getattr(torch.ops.sonicmoe, name).default for name in names]

    def policy(context, operator, *_, **__):
        is_ours = operator in ours
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return lambda *leaves: checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)


def compiled(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager")


WAYS = {
    "eager": (lambda call: call, 1),
    "again": (again, 2),
    "kept": (kept, 1),
    "compiled": (compiled, 1),
    "rows kept": (lambda call: kept(call, ["routed_dispatch"]), 2),
    "output kept": (lambda call: kept(call, ["routed_mlp"]), 1),
    "compiled again": (lambda call: compiled(again(call)), 1),
    "compiled kept": (lambda call: compiled(kept(call)), 1),
}


def assert_same(found, wanted):
    assert all(map(torch.equal, found, wanted)) and all(t.abs().max() > 0 for t in wanted)


@MODES
@pytest.mark.parametrize("way", WAYS)
def test_gives_the_bits_of_the_experts_and_keeps_nothing(way, fp8_mode, saves, fresh_compiler):
    layer, (around, forwards) = Layer(fp8_mode), WAYS[way]
    wanted = layer.results(layer.experts)
    saves.clear()
    found = layer.results(around(layer.routed))
    assert_same(found, wanted)
    gc.collect()
    assert saves == [True] * forwards and not routed._kept


@MODES
def test_sorted_rows_whose_output_the_caller_multiplies(fp8_mode):
    """They are those of probabilities of one; tests/oracle has these."""
    layer = Layer(fp8_mode)
    x, _, *weights = layer.leaves
    ones = layer.sorted(x, torch.ones(TOKENS), *weights)
    assert torch.equal(layer.sorted(x, None, *weights), ones) and ones.abs().max() > 0


def test_what_a_forward_keeps_goes_with_its_output():
    layer = Layer("off")
    out = layer.routed(*layer.leaves)
    assert len(routed._kept) == 1
    del out
    gc.collect()
    assert not routed._kept


def test_nothing_is_kept_without_gradients(saves):
    layer = Layer("off")
    with torch.no_grad():
        layer.routed(*layer.leaves)
    frozen = [leaf.detach() for leaf in layer.leaves]
    assert not layer.routed(*frozen).requires_grad
    assert saves == [False, False] and not routed._kept


@pytest.mark.parametrize("around", [lambda call: call, compiled])
def test_the_two_halves_of_a_backward(around, fresh_compiler):
    """As schedules of pipelines ask for them: gradients of tokens first, those of weights later."""
    layer = Layer("perf")
    wanted = layer.results(layer.experts)
    out = around(layer.routed)(*layer.leaves)
    first = torch.autograd.grad(out, layer.leaves[:2], layer.dout, retain_graph=True)
    second = torch.autograd.grad(out, layer.leaves[2:], layer.dout)
    assert_same([out, *first, *second], wanted)


@MODES
@pytest.mark.parametrize("way", ["eager", "again", "compiled", "compiled again", "rows kept"])
def test_weights_are_read_while_rows_travel(way, fp8_mode, monkeypatch, fresh_compiler):
    """Once for every dispatch, before the host knows what came; but for a backward without one."""
    layer, events = Layer(fp8_mode), []

    def noted(name, call):
        def noting(*arguments, **options):
            events.append(f"{name} begins")
            result = call(*arguments, **options)
            events.append(f"{name} ends")
            return result

        return noting

    monkeypatch.setattr(LocalTransport, "dispatch", noted("dispatch", LocalTransport.dispatch))
    monkeypatch.setattr(passed_call, "read_weights", noted("read", passed_call.read_weights))
    layer.results(WAYS[way][0](layer.routed))
    of_dispatch = ["dispatch begins", "read begins", "read ends", "dispatch ends"]
    # By the experts alone, behind the last dispatch. Plain weights are the caller's: a forward inside
    # the backward leaves nothing of them, and codes for what comes next.
    plain = fp8_mode == "off"
    reads = {"again": plain, "compiled again": 0, "rows kept": 1 + plain}.get(way, 1)
    wanted = of_dispatch * (1 + way.endswith("again")) + ["read begins", "read ends"] * reads
    assert events == wanted


def test_frozen_weights_get_no_gradients():
    layer = Layer("off")
    wanted = layer.results(layer.experts)
    layer.leaves[2:] = [leaf.detach() for leaf in layer.leaves[2:]]
    out = layer.routed(*layer.leaves)
    assert_same(torch.autograd.grad(out, layer.leaves[:2], layer.dout), wanted[1:3])


@pytest.mark.parametrize("around", [lambda call: call, compiled])
def test_what_a_backward_reads_of_its_caller(around, fresh_compiler):
    """Weights and biases, whose writes are refused; what has travelled was copied."""
    layer = Layer("off")
    wanted, call = layer.results(layer.experts), around(layer.routed)
    out = call(*layer.leaves)
    with torch.no_grad():
        for given in (layer.leaves[0], layer.leaves[1], layer.ids):
            given.zero_()
    assert_same([out, *torch.autograd.grad(out, layer.leaves, layer.dout)], wanted)
    for place in range(2, 6):
        layer = Layer("off")
        out = around(layer.routed)(*layer.leaves)
        with torch.no_grad():
            layer.leaves[place].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, layer.leaves, layer.dout)


def test_a_lost_rank_is_named(monkeypatch):
    layer = Layer("off")
    out = layer.routed(*layer.leaves)

    def closed(*_):
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr(LocalTransport, "combine", closed)
    words = "rank 0 of 1 lost another rank in the backward of the routed path over local"
    with pytest.raises(RankLostError, match=words):
        torch.autograd.grad(out, layer.leaves, layer.dout)


def test_rows_that_travel_in_fp8():
    """They are what an FP8 engine makes of them itself; weight gradients round them twice, and what
    meets a bias sees the gradient that has travelled.
    """
    layer = Layer("perf", fp8=True, fp8_grad=True)
    wanted, found = layer.results(layer.experts), layer.results(layer.routed)
    is_exact = True, True, False, False, False, True, False
    for exact, one, other in zip(is_exact, found, wanted, strict=True):
        distance = (one.float() - other.float()).norm() / other.float().norm()
        assert distance == 0 if exact else 0 < distance < 0.1


def test_the_bound_of_a_dispatch_that_waits_for_nothing(monkeypatch):
    """The bound is `max_tokens` where that is given, else the rank's own number of tokens."""
    asked = []
    monkeypatch.setattr(
        routed, "dispatcher_of", lambda *given, **options: asked.append((given, options))
    )
    for options in ({}, {"max_tokens": 96}, {"wait_for_counts": False}):
        ExpertGroup(EXPERTS, None, {"fp8": True} | options).dispatcher(8)
    ExpertGroup(EXPERTS, None, {"wait_for_counts": False, "max_tokens": 96}).dispatcher(8)
    bounds = [given[2] for given, _ in asked]
    assert bounds == [None, None, 8, 96] and asked[0][1] == asked[2][1] == {"fp8": True}
