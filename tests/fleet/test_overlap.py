"""The experts as steps of a schedule: the bits of `run_sonic_moe`, whatever runs in between."""

from __future__ import annotations

import pytest
from engine.fp8_arrivals import quantised
from engine.moe_golden import make_problem
from fleet.fleet_calls import LAYOUTS, Experts, assert_same, bf16
from framework import numpy, tensor, torch
from node.node_harness import problems
from pairwise import pairwise

from sonicmoe.fleet import carrier
from sonicmoe.fleet.overlap import ExpertsStep
from sonicmoe.fleet.run import run_sonic_moe

WIDE = {"hidden": 256, "intermediate": 64, "topk": 2}


@pytest.fixture(scope="module")
def problem():
    return make_problem(**WIDE, dtype=torch.bfloat16)


class Steps:
    """An `ExpertsStep` on a problem, and the tensors that it is called with."""

    def __init__(self, experts, problem, *, fp8=False, tokens=None, handle=None):
        topk = problem.indices.shape[1]
        self.step = ExpertsStep(topk, problem.num_experts, *experts.weights, fp8, handle)
        self.x, self.scale = bf16(problem.x), None
        if tokens is not None:
            self.x, self.scale = tokens.codes, tokens.scale_inv
        self.indices, self.scores = tensor(problem.indices), tensor(problem.probs, torch.float32)
        self.dout = bf16(problem.dout)

    def forward(self, **given):
        routing = (self.x, self.indices, self.scores)
        return self.step.forward(*routing, fp8_scale=self.scale, **given)

    def backward(self, dout=None):
        return self.step.backward(self.dout if dout is None else dout)


@pytest.mark.parametrize(
    ("layout", "main_grad", "fp8"), pairwise(LAYOUTS, ["weight", "none", "absent"], [False, True])
)
def test_has_the_bits_of_the_call(problem, layout, main_grad, fp8):
    usual, experts = (Experts(problem, layout, main_grad=main_grad) for _ in range(2))
    call = usual.call(fp8=fp8).backward()
    steps = Steps(experts, problem, fp8=fp8)
    out = steps.forward()
    dx, dscores = steps.backward()
    assert dx.dtype == torch.bfloat16 and dscores.dtype == torch.float32
    assert_same(map(numpy, (out, dx, dscores)), call.arrays)
    assert_same(experts.gradients(), usual.gradients())


def test_two_micro_batches_interleaved(problem):
    batches = problems(2, **WIDE, dtype=torch.bfloat16)
    usual, experts = (Experts(batches[0]) for _ in range(2))
    calls = [usual.call(batch, fp8=True).backward() for batch in batches]
    first, second = (Steps(experts, batch, fp8=True) for batch in batches)
    outs = [first.forward(), second.forward()]
    again = Steps(experts, batches[0], fp8=True)
    gradients = [first.backward()]
    again.forward()  # the next one, before the second's backward
    gradients.append(second.backward())
    for call, out, (dx, dscores) in zip(calls, outs, gradients, strict=True):
        assert_same(map(numpy, (out, dx, dscores)), call.arrays)
    assert_same(experts.gradients(), usual.gradients())


def test_tokens_and_gradients_in_fp8(problem, monkeypatch):
    """The combine's backward fills the handle between the two steps."""
    monkeypatch.setattr(carrier, "_declared", carrier.Carrier.FP32_1X128)
    x, dout = quantised(problem.x), quantised(problem.dout)
    results = []
    for stepped in (False, True):
        experts, handle = Experts(problem), {}
        filled = {"data": dout.codes, "scale": dout.scale_inv.view(torch.int32)}
        steps = Steps(experts, problem, fp8=True, tokens=x, handle=handle)
        if stepped:
            out = steps.forward()
            handle.update(filled)
            _, dscores = steps.backward(dout.codes)
        else:
            scores = tensor(problem.probs, torch.float32, grad=True)
            out = run_sonic_moe(
                x.codes, steps.indices, scores, 2, 4, *experts.weights, True,
                fp8_scale=x.scale_inv, fp8_combine_grad_handle=handle,
            )  # fmt: skip
            handle.update(filled)
            out.backward(steps.dout)  # a placeholder
            dscores = scores.grad
        assert handle == {}
        results.append([numpy(out), numpy(dscores), *experts.gradients()])
    assert_same(*results)
