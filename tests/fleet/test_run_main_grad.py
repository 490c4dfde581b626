"""`main_grad` in another layout than its weight: told by its shape, bit for bit, in the same buffer."""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import make_problem
from fleet.fleet_calls import (
    LAYOUTS,
    Experts,
    arrays_in,
    assert_same,
    each_layout,
    overwrite,
    to_grouped,
    to_sonic,
    zeros,
)
from framework import numpy, torch
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine

# In the second both layouts give w1 one shape, in the third w2.
SIZES = [(80, 48), (96, 48), (64, 64)]
each_size = pytest.mark.parametrize(("hidden", "inner"), SIZES)


class TestMainGradInTheOtherLayout:
    """PaddleFleet converts `w1.main_grad` with its weight and leaves `w2.main_grad` grouped."""

    def micro_batches(self, experts, count=2):
        for _ in range(count):
            experts.call().backward()

    def expected(self, problem, **given):
        """Grouped, from weights and gradients in one layout."""
        experts = Experts(problem, "grouped", **given)
        self.micro_batches(experts)
        return [numpy(weight.main_grad) for weight in experts.weights]

    @pytest.mark.parametrize(
        ("size", "fp8", "direct"), pairwise(SIZES, [False, True], [True, False]), ids=str
    )
    def test_fleets_way_gives_the_same_bits_in_the_same_buffers(
        self, size, fp8, direct, monkeypatch
    ):
        hidden, inner = size
        p = make_problem(hidden=hidden, intermediate=inner, dtype=torch.bfloat16)
        if not direct:
            monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "for a test")
        expected = self.expected(p, fp8=fp8)
        experts = Experts(p, "grouped", fp8=fp8)
        buffers = [weight.main_grad for weight in experts.weights]
        experts.convert("sonic")
        overwrite(buffers[0], np.zeros((4, 2 * inner, hidden)))
        self.micro_batches(experts)
        assert all(w.main_grad is b for w, b in zip(experts.weights, buffers, strict=True))
        assert tuple(buffers[1].shape) == (4, inner, hidden)
        assert_same([to_grouped(0, numpy(buffers[0])), numpy(buffers[1])], expected)

    @each_size
    @each_layout
    @pytest.mark.parametrize("fp8", [False, True])
    def test_weights_that_change_between_a_forward_and_its_backward(
        self, layout, hidden, inner, fp8
    ):
        """The gradient of w1 has the layout that the weight has when it is added."""
        p = make_problem(hidden=hidden, intermediate=inner, dtype=torch.bfloat16)
        experts = Experts(p, layout, main_grad="none", fp8=fp8)
        of = lambda: self.grouped(experts)  # noqa: E731
        experts.call().backward()
        once, call = of(), experts.call()
        experts.convert("sonic" if layout == "grouped" else "grouped")
        moved = once[0] if experts.layout == "grouped" else to_sonic(0, once[0])
        overwrite(experts.weights[0].main_grad, moved)
        assert_same(of(), once)
        call.backward()
        assert_same(of(), [2 * array for array in once])

    def grouped(self, experts):
        """`main_grad` that was made here, which has the layout of w1, or for w2 is grouped."""
        first, second = (numpy(weight.main_grad) for weight in experts.weights)
        return [to_grouped(0, first) if experts.layout == "sonic" else first, second]

    @pytest.mark.parametrize(("layout", "of_up", "of_down"), pairwise(*[LAYOUTS] * 3))
    def test_shapes_tell_each_by_itself(self, problem, layout, of_up, of_down):
        expected, experts = self.expected(problem), Experts(problem, layout)
        for index, wanted in enumerate((of_up, of_down)):
            shape = arrays_in(wanted, problem.up_gate, problem.down)[index].shape
            experts.weights[index].main_grad = zeros(shape)
        self.micro_batches(experts)
        assert_same(experts.gradients(), expected)
