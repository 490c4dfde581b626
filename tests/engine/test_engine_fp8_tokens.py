"""Tokens that arrive in FP8: read as they came, rounded a second time for wgrad alone, and not even
there where a row has one scale.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.fp8_arrivals import EXACT, FORMS, ISO128, odd_multiples, poisoned, quantised, run
from engine.fp8_by_hand import by_hand
from engine.moe_golden import (
    OUTPUTS,
    Result,
    assert_same_bits,
    golden,
    make_problem,
    set_up,
    user_gradients,
)
from engine.test_engine_fp8 import coarse_problem, distance
from framework import numpy, relative_rmse, tensor, torch

from sonicmoe.engine.interface import EngineSettings, token_dtype, token_format
from sonicmoe.engine.settings import TokenFormat
from sonicmoe.enums import ZCode
from sonicmoe.errors import ConfigError, DTypeError, ShapeError
from sonicmoe.observe import listening
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import to_bfloat16, tokens_of


@pytest.fixture(scope="module")
def coarse():
    return coarse_problem()


@pytest.fixture(scope="module")
def gaussian():
    return make_problem(tokens=160, hidden=256, intermediate=128, topk=2, dtype=torch.bfloat16)


def test_forms_are_told_by_the_shape_of_the_scales(gaussian):
    for row, form in ((False, TokenFormat.E4M3_1X128), (True, TokenFormat.E4M3_ROW)):
        x = quantised(gaussian.x, row)
        assert token_format(x) is form and token_dtype(x) == torch.bfloat16
    # One scale per row of up to 128 columns is the 1x128 form, which rounds again.
    assert token_format(quantised(gaussian.x[:, :80], True)) is TokenFormat.E4M3_1X128


def test_the_senders_quantisation_is_the_engines_own(gaussian):
    """Equal codes, equal bits: everything but dw1, whose operand was rounded once here."""
    ours = run(gaussian, ISO128, x=quantised(gaussian.x))
    plain = run(gaussian, ISO128)
    assert_same_bits(ours, plain, names=("out", "dx", "dprobs", "dw2"))
    exact = golden(gaussian)
    once, twice = (relative_rmse(r.dw1, exact.dw1) for r in (plain, ours))
    assert 1.03 * once < twice < 1.12 * once


@pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])
@FORMS
def test_equals_the_recipe_by_hand(coarse, row, fp8_wgrad):
    """Powers of two and small integers: every number is exact, so codes, blocks and order show."""
    settings = replace(EXACT, fp8_wgrad=fp8_wgrad)
    x = odd_multiples(coarse.x, row)
    seen = coarse.but(x=numpy(dequantize(x)))
    scale = numpy(x.scale_inv)[:, 0] if row and fp8_wgrad else None
    expected = by_hand(seen, settings, torch.bfloat16, skip=["x"], exact=True, row_scale=scale)
    actual = run(coarse, settings, x=x)
    for name in OUTPUTS:
        assert distance(actual, expected, name) < 1e-6, name


def test_a_second_rounding_and_a_fold_would_be_noticed(coarse):
    """The test above tells the three ways of making dw1's operands apart."""
    x = odd_multiples(coarse.x, True)
    seen, scale = coarse.but(x=numpy(dequantize(x))), numpy(x.scale_inv)[:, 0]
    ways = [
        by_hand(seen, EXACT, torch.bfloat16, ["x", *more], True, fold).dw1
        for more, fold in (([], None), (["wgrad_x"], None), ([], scale))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(ways[one] - ways[other]).max() > 1e-3 * np.abs(ways[one]).max()


def test_row_scales_make_dw1_more_exact(gaussian):
    exact = golden(gaussian).dw1
    folded, twice = (
        relative_rmse(run(gaussian, ISO128, x=quantised(gaussian.x, row)).dw1, exact)
        for row in (True, False)
    )
    assert folded < 0.97 * twice


@FORMS
@pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])
def test_rows_without_a_valid_slot_are_never_read(gaussian, row, fp8_wgrad):
    settings = replace(ISO128, fp8_wgrad=fp8_wgrad)
    indices = gaussian.indices.copy()
    indices[::5] = -1
    problem = gaussian.but(indices=indices)
    x = quantised(problem.x, row)
    poison = run(problem, settings, x=poisoned(x, problem))
    assert_same_bits(poison, run(problem, settings, x=x))
    assert np.isfinite(poison.dw1).all() and not poison.out[::5].any()


@FORMS
@pytest.mark.parametrize("save_z", list(ZCode), ids=lambda z: z.value)
def test_recomputing_z_and_stagewise_memory_change_no_bit(gaussian, row, save_z):
    x, settings = quantised(gaussian.x, row), replace(ISO128, save_z=save_z)
    usual = run(gaussian, settings, x=x)
    for changes in ({"recompute_z": True}, {"frees_stagewise": True}):
        assert_same_bits(run(gaussian, replace(settings, **changes), x=x), usual)


@FORMS
def test_saved_tensors_hold_codes_and_scales(gaussian, row):
    x = quantised(gaussian.x, row)
    setup = replace(set_up(gaussian, ISO128, torch.bfloat16), x=x)
    out, saved = setup.forward()
    tensors, spec = saved.pack()
    assert spec.given == 2 and tensors[0] is x.codes and tensors[1] is x.scale_inv
    assert not any(isinstance(value, torch.Tensor) for value in vars(spec).values())
    sums = setup.accumulators()
    dx, dprobs = setup.engine.backward(setup.dout, spec.unpack(tensors), setup.weights, sums)
    found = Result(numpy(out), numpy(dx), numpy(dprobs), *user_gradients(gaussian, sums))
    assert_same_bits(found, run(gaussian, ISO128, x=x))


def test_an_infinite_scale_is_nan_in_the_experts_of_its_token_alone(gaussian):
    token = int(np.flatnonzero((gaussian.indices == 0).any(1))[0])
    served = {int(e) for e in gaussian.indices[token] if 0 <= e < gaussian.num_experts}
    for row in (True, False):
        x = quantised(gaussian.x, row)
        scale = numpy(x.scale_inv)
        scale[token, -1] = np.inf
        found = run(gaussian, ISO128, x=tokens_of(x.codes, tensor(scale, torch.float32)))
        assert set(np.flatnonzero(np.isnan(found.out).any(1))) == {token}
        for expert in range(gaussian.num_experts):
            bad = np.isnan(found.dw1[expert])
            assert bad.all() if expert in served else not bad.any(), expert


def test_the_operands_of_wgrad_are_no_stages_where_scales_are_folded(gaussian):
    names = {}
    for row in (True, False):
        seen = names[row] = []
        with listening(lambda name, value, seen=seen: seen.append(name) or value):
            run(gaussian, ISO128, x=quantised(gaussian.x, row))
    assert {"wgrad_x", "wgrad_dz", "x_fp8", "dw1"} <= {*names[False]}
    assert {*names[False]} - {*names[True]} == {"wgrad_x", "wgrad_dz"}


def test_tokens_that_the_engine_cannot_read_are_refused_by_name(gaussian):
    x = quantised(gaussian.x)
    with pytest.raises(ConfigError, match="FP8 is off; needed: the values in bfloat16"):
        run(gaussian, EngineSettings(), x=x)
    wide = EngineSettings(recipe=RECIPES["wide256"])
    with pytest.raises(ConfigError, match="recipe 'wide256' reads them in 1x256 blocks"):
        run(gaussian, wide, x=x)
    assert np.isfinite(run(gaussian, wide, x=quantised(gaussian.x, True)).out).all()
    with pytest.raises(ShapeError, match=r"x has shape \(159, 256\)"):
        run(gaussian, ISO128, x=quantised(gaussian.x[:159]))
    with pytest.raises(DTypeError, match="x is float8_e4m3fn; needed: bfloat16"):
        run(gaussian, ISO128, x=x.codes)


def test_values_in_bf16(gaussian):
    x = quantised(gaussian.x)
    values = to_bfloat16(x)
    assert values.dtype == torch.bfloat16
    np.testing.assert_array_equal(numpy(values), numpy(dequantize(x).to(torch.bfloat16)))
