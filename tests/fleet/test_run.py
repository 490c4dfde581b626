"""What calls of `run_sonic_moe` share: layouts that change in place, layers of a pair, weights that are
quantised once. tests/oracle has the numbers.
"""

from __future__ import annotations

import gc
from itertools import product

import numpy as np
import pytest
from engine.moe_golden import make_problem
from fleet.fleet_calls import (
    Experts,
    assert_same,
    bf16,
    each_layout,
    overwrite,
    to_grouped,
)
from framework import numpy, relative_rmse, torch
from pairwise import pairwise

from sonicmoe.fleet import layer as layers
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.layer import all_weights_changed, layer_of, weights_changed
from sonicmoe.weights.stacked import GROUPED, NATIVE, layout_of_pair


@each_layout
class TestTheCall:
    def test_scores_in_bf16_and_the_keyword_of_the_ring(self, problem, layout):
        """As Fleet's routers and its newest ring dispatcher pass them."""
        rounded = problem.but(probs=numpy(bf16(problem.probs)))
        usual, experts = Experts(rounded, layout), Experts(rounded, layout)
        call, wanted = (
            experts.call(scores_dtype=torch.bfloat16, sync_free_sizing=True),
            usual.call(),
        )
        found, wanted = call.backward(), wanted.backward()
        assert_same([numpy(found.out), found.dx], [numpy(wanted.out), wanted.dx])
        assert found.scores.grad.dtype == torch.bfloat16
        assert_same([found.dprobs], [numpy(bf16(wanted.dprobs))])
        assert_same(experts.gradients(), usual.gradients())

    def test_weights_are_quantised_once(self, wide, layout, prepared, weights_on_a_gpu):
        experts = Experts(wide, layout, fp8=True)
        config = FP8Config()
        experts.call(fp8_config=config)
        weights_changed(*experts.weights)
        prepared.clear()
        for again in (False, True, False):
            config.recompute_z = again
            experts.call(fp8_config=config).backward()
        assert len(prepared) == 1


class TestLayouts:
    """Shapes tell the layout, anew at each call."""

    def test_every_pair_of_shapes_is_decided(self):
        for h, i in product(range(1, 9), repeat=2):
            sonic, grouped = ((3, 2 * i, h), (3, h, i)), ((3, h, 2 * i), (3, i, h))
            assert layout_of_pair(*sonic, h) == NATIVE
            assert layout_of_pair(*grouped, h) == GROUPED

    @pytest.mark.parametrize(
        ("fp8", "hidden", "intermediate"),
        [(False, 96, 48), (True, 64, 64), (False, 64, 64), (True, 80, 48)],
    )
    def test_parameters_change_it_in_place_between_steps(self, fp8, hidden, intermediate):
        """Also where one of them has one shape in both layouts."""
        p = make_problem(hidden=hidden, intermediate=intermediate, dtype=torch.bfloat16)
        experts, expected = Experts(p, "grouped", fp8=fp8), None
        layer = layer_of(*experts.weights, hidden)
        for layout in ("grouped", "sonic", "grouped", "sonic"):
            experts.to_layout(layout)
            for weight in experts.weights:
                weight.main_grad = None
            found = experts.call().backward().arrays
            assert layer_of(*experts.weights, hidden) is layer
            expected = expected or found
            assert_same(found, expected)

    @pytest.mark.parametrize(
        ("size", "layout", "fp8"),
        pairwise([(80, 48), (96, 48), (64, 64)], ["sonic", "grouped"], [False, True]), ids=str,
    )  # fmt: skip
    def test_weights_that_change_between_a_forward_and_its_backward(self, size, layout, fp8):
        """The gradient of w1 has the layout that the weight has when it is added; w2's is grouped."""
        p = make_problem(hidden=size[0], intermediate=size[1], dtype=torch.bfloat16)
        experts = Experts(p, layout, main_grad="none", fp8=fp8)

        def grouped():
            first, second = (numpy(weight.main_grad) for weight in experts.weights)
            return [to_grouped(0, first) if experts.layout == "sonic" else first, second]

        experts.call().backward()
        once, call = grouped(), experts.call()
        experts.to_layout("sonic" if layout == "grouped" else "grouped")
        call.backward()
        assert_same(grouped(), [2 * array for array in once])

    def test_a_change_of_the_layout_is_seen_where_no_write_is(
        self, wide, prepared, weights_on_a_gpu, traceless
    ):
        experts = Experts(wide, "grouped", fp8=True)
        experts.call()
        weights_changed(*experts.weights)
        first = numpy(experts.call().out)
        prepared.clear()
        experts.call()
        assert not prepared
        experts.to_layout("sonic")
        np.testing.assert_array_equal(numpy(experts.call().out), first)
        assert len(prepared) == 1


class TestTheLayerOfAPair:
    def test_no_parameter_waits_for_the_collector(self, problem):
        gc.collect()
        gc.disable()
        try:
            before = len(layers._layers)
            experts = Experts(problem, fp8=True)
            experts.call().backward()
            del experts
            assert len(layers._layers) == before
        finally:
            gc.enable()

    @pytest.mark.parametrize("told", ["pair", "all"])
    def test_an_announced_write_is_seen_where_none_shows(
        self, wide, told, weights_on_a_gpu, traceless
    ):
        experts = Experts(wide, fp8=True)
        weights_changed(*experts.weights)
        first = numpy(experts.call().out)
        overwrite(experts.weights[1], 2 * numpy(experts.weights[1]))
        if told == "pair":
            weights_changed(*experts.weights)
        else:
            all_weights_changed()
        assert relative_rmse(numpy(experts.call().out), 2 * first) < 1e-6
