"""`run_sonic_moe` against experts in fp64, in both layouts, from BF16 and from FP8 tokens."""

from __future__ import annotations

import gc
from itertools import product

import numpy as np
import pytest
from engine.fp8_arrivals import quantised
from engine.moe_golden import make_problem
from fleet.fleet_calls import Experts, assert_same, bf16, each_layout, overwrite
from framework import numpy, relative_rmse, tensor, torch
from node.node_harness import Layer

from sonicmoe.config import SonicMoEConfig
from sonicmoe.fleet import carrier
from sonicmoe.fleet import layer as layers
from sonicmoe.fleet.carrier import Carrier, declare_carrier
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.layer import all_weights_changed, layer_of, weights_changed
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast as quantize_fast
from sonicmoe.weights.stacked import GROUPED, NATIVE, layout_of_pair

# Fleet's engine keeps z in BF16 unless it is told otherwise.
FP8 = SonicMoEConfig(engine="reference", fp8_mode="perf", save_z="bf16")


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


def fp8_tokens(problem, form):
    """`(codes, scale in one of Fleet's forms, what they stand for)`."""
    tokens = quantised(problem.x)
    if form == "fp32":
        return tokens.codes, tokens.scale_inv, tokens
    if form == "words":
        declare_carrier(Carrier.FP32_1X128)
        return tokens.codes, tokens.scale_inv.view(torch.int32), tokens
    codes, exponents = quantize_fast(bf16(problem.x), scale_dtype=torch.int32)
    return codes, exponents, carrier.tokens_from_carrier(codes, exponents).tokens


class TestFp8Tokens:
    """Codes that arrive with their scales."""

    @pytest.mark.parametrize("form", ["fp32", "words", "e8m0"])
    @each_layout
    def test_has_the_bits_of_the_node(self, wide, layout, form, undeclared):
        codes, scale, tokens = fp8_tokens(wide, form)
        experts = Experts(wide, layout, fp8=True)
        call = experts.call(x=codes, fp8_scale=scale).backward()
        node = Layer(wide, arrangement="native", dtype=torch.bfloat16, config=FP8)
        node.set_main_grad(0.0)
        scores = tensor(wide.probs, torch.float32, grad=True)
        out = node.node(tokens.codes, None, tensor(wide.indices), scores, tokens.scale_inv)
        out.backward(call.dout)
        assert call.out.dtype == torch.bfloat16
        assert_same([numpy(call.out), call.dprobs], [numpy(out), numpy(scores.grad)])
        assert_same(experts.gradients(), node.gradients("main_grad"))


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
            experts.convert(layout)
            for weight in experts.weights:
                weight.main_grad = None
            found = experts.call().backward().arrays
            assert layer_of(*experts.weights, hidden) is layer
            expected = expected or found
            assert_same(found, expected)

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
        experts.convert("sonic")
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
