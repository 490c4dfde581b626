"""Rows that lie in expert order, as trainers hand them over: the experts of `expert_mlp` with K = 1,
eager, as an operator, and in a graph.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from framework import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp, planned_mlp
from sonicmoe.layer.plan import make_plan, number_of
from sonicmoe.layouts import NATIVE

COUNTS, BEYOND, HIDDEN, INNER = [3, 0, 130, 7], 5, 32, 16
ROWS = sum(COUNTS) + BEYOND
MODES = pytest.mark.parametrize("fp8_mode", ["off", "perf"])


def plan_of(fp8_mode):
    with SonicMoEConfig(fp8_mode=fp8_mode).activate():
        made = make_plan(ActivationType.SWIGLU, NATIVE, None)
    return replace(made, is_own=True)


def layer():
    """Tokens whose rows beyond the sum are poisoned, the gradient of the output, and weights."""
    torch.manual_seed(0)
    experts = len(COUNTS)
    x, dout = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    x[sum(COUNTS) :] = dout[sum(COUNTS) :] = float("nan")
    shapes = (experts, 2 * INNER, HIDDEN), (experts, HIDDEN, INNER)
    shapes = *shapes, (experts, 2 * INNER), (experts, HIDDEN)
    return x, dout, [torch.randn(shape).mul_(0.3) for shape in shapes]


def gradients(call, x, dout, weights, *others):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights, *others)]
    out = call(leaves[0], tuple(leaves[1:5]), *leaves[5:])
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_ids(fp8, x, weights, probs=None):
    """The same experts by indices, whose last rows are not here."""
    counts = torch.tensor([*COUNTS, BEYOND])
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts).reshape(-1, 1)
    probs = torch.ones(ROWS, 1) if probs is None else probs.reshape(-1, 1)
    return expert_mlp(x, ids, probs, *weights, ActivationType.SWIGLU, use_fp8=fp8)


def same(ours, wanted):
    for one, other in zip(ours, wanted, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


@MODES
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_indices_and_reads_no_row_beyond_the_sum(fp8_mode, weighted):
    plan, (x, dout, weights) = plan_of(fp8_mode), layer()
    probs = [torch.rand(ROWS)] if weighted else []

    def call(x, weights, probs=None):
        return planned_mlp(
            plan, number_of(plan), x, torch.tensor(COUNTS), probs, weights, module=None
        )

    ours = gradients(call, x, dout, weights, *probs)
    wanted = gradients(lambda *given: by_ids(fp8_mode == "perf", *given), x, dout, weights, *probs)
    same(ours, wanted)
    assert (ours[0][sum(COUNTS) :] == 0).all() and (ours[1][sum(COUNTS) :] == 0).all()


@MODES
def test_as_an_operator_of_a_graph(fp8_mode):
    plan, (x, dout, weights) = plan_of(fp8_mode), layer()
    number, counts = number_of(plan), torch.tensor(COUNTS)

    def call(x, weights):
        return planned_mlp(plan, number, x, counts, None, weights, module=None)

    wanted = gradients(call, x, dout, weights)
    torch._dynamo.reset()
    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    # Another configuration around the call has no say: the plan is the layer's own.
    with SonicMoEConfig(fp8_mode="mem").activate():
        same(gradients(graph, x, dout, weights), wanted)
