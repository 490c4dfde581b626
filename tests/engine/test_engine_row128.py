"""The recipe `row128`: scales that stay along a row, and weight gradients from the codes of x and
dout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.fp8_arrivals import (
    WGRADS,
    arrived_by_hand,
    assert_all_apart,
    gaussian_problem,
    odd_multiples,
    poisoned,
    problem_with_idle_tokens,
    quantised,
    run,
    stages_of,
)
from engine.fp8_by_hand import assert_equal_to_rounding, by_hand, coarse_problem
from engine.moe_golden import assert_same_bits, golden, make_problem, set_up
from framework import numpy, relative_rmse, tensor, torch

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.capabilities import BF16, HOPPER, problem
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import Workload
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.quant.tokens import tokens_of

NAMES = ("row128", "row128-dx256")
ROW128 = EngineSettings(recipe=RECIPES["row128"])
EXACT = EngineSettings(ActivationType.REGLU, RECIPES["row128-pow2"])


def spread_channels(problem, octaves=12):
    """The last channels of x and of dout are 2^octaves quieter, and their weights louder, so that
    sums stay exact; half of the weights are zero for the same reason.
    """
    quiet, kept = np.ones(problem.x.shape[1]), np.arange(problem.x.shape[1]) % 2
    quiet[128:] = 2.0**-octaves
    return problem.but(
        x=problem.x * quiet,
        dout=problem.dout * quiet,
        up_gate=problem.up_gate * (kept / quiet)[:, None],
        down=problem.down * kept / quiet,
    )


@pytest.fixture(scope="module")
def coarse():
    return spread_channels(coarse_problem(tokens=150, hidden=272))


@pytest.fixture(scope="module")
def gaussian():
    return gaussian_problem()


def own_sender(values, settings=ROW128):
    """Tokens whose sender quantises as the engine does."""
    q = quantize(tensor(values, torch.float32), settings.recipe.x)
    return tokens_of(q.codes, q.scale_inv)


def senders(problem, row=False):
    """x and dout as the usual sender quantises them."""
    return {side: quantised(getattr(problem, side), row) for side in ("x", "dout")}


@WGRADS
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_recipe_by_hand_where_blocks_have_their_own_scales(coarse, name, fp8_wgrad):
    settings = EngineSettings(ActivationType.REGLU, RECIPES[f"{name}-pow2"], fp8_wgrad)
    expected = by_hand(coarse, settings, torch.bfloat16, exact=True)
    assert_equal_to_rounding(run(coarse, settings), expected)


@pytest.mark.parametrize("sides", [("x",), ("x", "dout")], ids="+".join)
def test_equals_the_recipe_by_hand_on_tokens_that_arrive_in_fp8(coarse, sides):
    """One scale per row and 128 columns: codes of the largest one are kept, the others rounded."""
    sent = {side: odd_multiples(getattr(coarse, side), False) for side in sides}
    expected = arrived_by_hand(coarse, EXACT, exact=False, **sent)
    assert_equal_to_rounding(run(coarse, EXACT, **sent), expected)


def test_a_fold_and_a_second_rounding_would_be_noticed(coarse):
    """The tests above tell folding from not folding, and codes that were rounded once more from
    those that were not.
    """
    x = odd_multiples(coarse.x, False)
    seen, scale = coarse.but(x=numpy(dequantize(x))), numpy(x.scale_inv).max(1)
    square = EXACT.recipe.wgrad_dz
    unfolded = replace(EXACT.recipe, folds_wgrad=False, wgrad_x=square, wgrad_dout=square)
    ways = [
        by_hand(seen, replace(EXACT, recipe=recipe), torch.bfloat16, ["x"], x_scale=rows).dw1
        for recipe, rows in ((EXACT.recipe, scale), (unfolded, None), (unfolded, scale))
    ]
    assert_all_apart(ways, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_sender_that_quantises_as_the_engine_does_changes_no_bit(gaussian, name):
    """No tensor is rounded twice, dw1 and dw2 neither; the usual sender's codes are."""
    settings = EngineSettings(recipe=RECIPES[name])
    plain = run(gaussian, settings)
    sent = run(gaussian, settings, own_sender(gaussian.dout), own_sender(gaussian.x))
    assert_same_bits(sent, plain)
    usual = run(gaussian, settings, x=quantised(gaussian.x))
    exact = golden(gaussian).dw1
    assert relative_rmse(usual.dw1, exact) > 1.01 * relative_rmse(plain.dw1, exact)


def test_one_scale_per_row_is_the_same_where_no_block_is_far_below(gaussian):
    """Gaussian rows: one scale for all columns, in either form of the scales."""
    assert_same_bits(run(gaussian, ROW128, **senders(gaussian, True)), run(gaussian, ROW128))


def test_plain_wgrad_folds_nothing(gaussian):
    """It multiplies unquantised values, as under every recipe."""
    plain = run(gaussian, replace(ROW128, fp8_wgrad=False))
    exact, folded = golden(gaussian), run(gaussian, ROW128)
    assert_same_bits(plain, folded, names=("out", "dx", "dprobs"))
    for name in ("dw1", "dw2"):
        once, twice = (getattr(one, name) for one in (plain, folded))
        wanted = getattr(exact, name)
        assert relative_rmse(once, wanted) < 0.9 * relative_rmse(twice, wanted), name


@pytest.mark.parametrize("form", ["bf16", "1x128"])
@pytest.mark.parametrize("save_z", list(ZCode), ids=lambda z: z.value)
def test_recomputing_z_and_stagewise_memory_change_no_bit(gaussian, form, save_z):
    arriving = senders(gaussian) if form != "bf16" else {}
    settings = replace(ROW128, save_z=save_z)
    usual = run(gaussian, settings, **arriving)
    for changes in ({"recompute_z": True}, {"frees_stagewise": True}):
        assert_same_bits(run(gaussian, replace(settings, **changes), **arriving), usual)


def test_rows_without_a_valid_slot_and_padding_rows_read_no_scale(gaussian):
    problem = problem_with_idle_tokens(gaussian, 5)
    arriving = senders(problem)
    poison = run(problem, ROW128, **{name: poisoned(q, problem) for name, q in arriving.items()})
    assert_same_bits(poison, run(problem, ROW128, **arriving))
    assert all(np.isfinite(value).all() for _, value in poison.items())


@pytest.mark.parametrize("where", ["x", "dout"])
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=str)
def test_one_bad_element_makes_the_gradient_of_its_experts_nan_and_no_other(gaussian, where, value):
    token = int(np.flatnonzero((gaussian.indices == 0).any(1))[0])
    served = {int(e) for e in gaussian.indices[token] if 0 <= e < gaussian.num_experts}
    bad = getattr(gaussian, where).copy()
    bad[token, 3] = value
    found, healthy = run(gaussian.but(**{where: bad}), ROW128), run(gaussian, ROW128)
    for name in ("dw1",) if where == "dout" else ("dw1", "dw2"):
        for expert, gradient in enumerate(getattr(found, name)):
            assert np.isnan(gradient).all() if expert in served else np.isfinite(gradient).all()
    if where == "dout" and value == np.inf:
        assert all(np.isnan(found.dw2[expert]).all() for expert in served)
    others = np.arange(len(bad)) != token
    assert_same_bits(found, healthy, ("out", "dx", "dprobs"), others)


def test_small_values_survive_the_fold():
    """dz s_t is far below dz here; its blocks have scales of their own, so no bit is lost."""
    problem = make_problem(ActivationType.REGLU, tokens=64, hidden=256, intermediate=64, topk=2)
    quiet = problem.but(dout=problem.dout * 2.0**-30, x=problem.x * 2.0**-12)
    settings = replace(EXACT, recipe=RECIPES["row128"])
    loud, found = run(problem, settings), run(quiet, settings)
    # bf16 holds both exactly, and powers of two change no code.
    np.testing.assert_array_equal(found.dw1, loud.dw1 * 2.0**-54)
    np.testing.assert_array_equal(found.dw2, loud.dw2 * 2.0**-54)


def test_the_operands_of_wgrad_are_no_stages(gaussian):
    folded, plain = (
        stages_of(gaussian, replace(ROW128, fp8_wgrad=fp8_wgrad)) for fp8_wgrad in (True, False)
    )
    wgrad = {"wgrad_x", "wgrad_dz", "wgrad_dout", "wgrad_y1s"}
    assert wgrad <= {*plain} and not wgrad & {*folded}
    assert folded.count("x_fp8") == folded.count("dout_fp8") == 1


@pytest.mark.parametrize("name", NAMES)
def test_one_buffer_per_weight_is_refused(name):
    config = SonicMoEConfig(fp8_mode="perf", recipe=name, iso_weight=True).resolve()
    needed = rf"iso_weight needs .*'{name}'.* \(one scale along K, which is another axis in dgrad\)"
    with pytest.raises(ConfigError, match=needed):
        EngineSettings.from_config(config, ActivationType.SWIGLU)


def test_engines_without_its_kernels_refuse_it_by_name(gaussian):
    settings = EngineSettings(recipe=RECIPES["row128"])
    workload = Workload(settings, 3072, 1536)
    served = replace(workload, settings=EngineSettings(recipe=RECIPES["row128-dx256"]))
    assert problem(HOPPER, served, "sm_90a") is None
    words = "the recipe is 'row128', and its kernels are made for 'dx256' or 'row128-dx256'"
    assert problem(HOPPER, workload, "sm_90a") == words
    assert "FP8 is on (recipe 'row128')" in problem(BF16, workload, "sm_90a")
    plain = set_up(gaussian, EngineSettings(), torch.bfloat16).weights
    with pytest.raises(ConfigError, match=f"the hopper engine cannot compute this: {words}"):
        HopperEngine().prepare_weights(plain.w1, plain.w2, None, None, settings)
    assert SonicMoEConfig(fp8_mode="perf").resolve().recipe == "dx256", "not the default"


def test_each_direction_has_its_own_buffer(gaussian):
    weights = set_up(gaussian, ROW128, torch.bfloat16).weights
    assert weights.two_orders and weights.w2 is not weights.w2_dgrad
    w1, w2_dgrad = numpy(weights.w1.scale_inv), numpy(weights.w2_dgrad.scale_inv)
    assert (w1 == w1[:, :, :1]).all() and (w2_dgrad == w2_dgrad[:, :1]).all()
