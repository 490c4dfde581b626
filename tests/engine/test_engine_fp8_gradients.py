"""Gradients of the output that arrive in FP8: the codes are the operand of dgated, their values that
of wgrad, which rounds them again unless a row has one scale.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.fp8_arrivals import EXACT, FORMS, ISO128, odd_multiples, poisoned, quantised, run
from engine.fp8_by_hand import by_hand
from engine.moe_golden import (
    OUTPUTS,
    assert_same_bits,
    golden,
    make_problem,
    set_up,
)
from engine.test_engine_fp8 import coarse_problem, distance
from framework import IS_PADDLE, numpy, relative_rmse, tensor, torch

from sonicmoe.engine.border import check_dout
from sonicmoe.engine.capabilities import BF16, HOPPER, gradient_problem
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import TokenFormat
from sonicmoe.enums import ZCode
from sonicmoe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from sonicmoe.observe import listening
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import tokens_of

WGRADS = pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])


@pytest.fixture(scope="module")
def gaussian():
    return make_problem(tokens=160, hidden=256, intermediate=128, topk=2, dtype=torch.bfloat16)


def test_the_senders_quantisation_is_the_engines_own(gaussian):
    """Equal codes, equal bits: everything but dw2, whose operand was rounded once here."""
    ours, plain = run(gaussian, ISO128, quantised(gaussian.dout)), run(gaussian, ISO128)
    assert_same_bits(ours, plain, names=("out", "dx", "dprobs", "dw1"))
    exact = golden(gaussian)
    once, twice = (relative_rmse(r.dw2, exact.dw2) for r in (plain, ours))
    assert 1.03 * once < twice < 1.12 * once


@WGRADS
@FORMS
@pytest.mark.parametrize("both", [False, True], ids=["dout", "both"])
def test_equals_the_recipe_by_hand(row, fp8_wgrad, both):
    """Powers of two and small integers: every number is exact, so codes, blocks and order show."""
    problem, settings = coarse_problem(), replace(EXACT, fp8_wgrad=fp8_wgrad)
    dout = odd_multiples(problem.dout, row)
    x = odd_multiples(problem.x, row) if both else None
    seen = problem.but(dout=numpy(dequantize(dout)))
    scales, skip = {}, ["dout"]
    if row and fp8_wgrad:
        scales["dout_scale"] = numpy(dout.scale_inv)[:, 0]
    if x is not None:
        seen, skip = seen.but(x=numpy(dequantize(x))), ["x", "dout"]
        if scales:
            scales["row_scale"] = numpy(x.scale_inv)[:, 0]
    expected = by_hand(seen, settings, torch.bfloat16, skip=skip, exact=True, **scales)
    actual = run(problem, settings, dout, x)
    for name in OUTPUTS:
        assert distance(actual, expected, name) < 1e-6, name


def test_a_second_rounding_and_a_fold_would_be_noticed():
    """The test above tells the three ways of making dw2's operands apart."""
    problem = coarse_problem()
    dout = odd_multiples(problem.dout, True)
    seen, scale = problem.but(dout=numpy(dequantize(dout))), numpy(dout.scale_inv)[:, 0]
    ways = [
        by_hand(seen, EXACT, torch.bfloat16, ["dout", *more], True, None, fold).dw2
        for more, fold in (([], None), (["wgrad_dout"], None), ([], scale))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(ways[one] - ways[other]).max() > 1e-3 * np.abs(ways[one]).max()


def test_row_scales_make_dw2_more_exact(gaussian):
    exact = golden(gaussian).dw2
    folded, twice = (
        relative_rmse(run(gaussian, ISO128, quantised(gaussian.dout, row)).dw2, exact)
        for row in (True, False)
    )
    assert folded < 0.97 * twice


@FORMS
@WGRADS
def test_rows_without_a_valid_slot_are_never_read(gaussian, row, fp8_wgrad):
    settings = replace(ISO128, fp8_wgrad=fp8_wgrad)
    indices = gaussian.indices.copy()
    indices[::5] = -1
    problem = gaussian.but(indices=indices)
    dout = quantised(problem.dout, row)
    poison = run(problem, settings, poisoned(dout, problem))
    assert_same_bits(poison, run(problem, settings, dout))
    assert all(np.isfinite(value).all() for _, value in poison.items())


@FORMS
@pytest.mark.parametrize("save_z", list(ZCode), ids=lambda z: z.value)
def test_recomputing_z_and_stagewise_memory_change_no_bit(gaussian, row, save_z):
    dout, settings = quantised(gaussian.dout, row), replace(ISO128, save_z=save_z)
    usual = run(gaussian, settings, dout)
    for changes in ({"recompute_z": True}, {"frees_stagewise": True}):
        assert_same_bits(run(gaussian, replace(settings, **changes), dout), usual)


@FORMS
def test_biases_see_the_values(row):
    """db2 and the bias' share of dprobs read the values of the codes."""
    problem = make_problem(tokens=64, hidden=256, intermediate=64, topk=2, bias=True)
    dout = quantised(problem.dout, row)
    values = problem.but(dout=numpy(dequantize(dout)))
    found = []
    for given in (dout, tensor(values.dout, torch.float32)):
        setup = replace(set_up(values, ISO128), dout=given)
        _, saved = setup.forward()
        sums = setup.accumulators()
        _, dprobs = setup.engine.backward(setup.dout, saved, setup.weights, sums)
        found.append((numpy(sums.db2), numpy(dprobs)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert relative_rmse(found[0][1], found[1][1]) < 0.02


def test_the_operands_of_wgrad_are_no_stages_where_scales_are_folded(gaussian):
    names = {}
    for row in (True, False):
        seen = names[row] = []
        with listening(lambda name, value, seen=seen: seen.append(name) or value):
            run(gaussian, ISO128, quantised(gaussian.dout, row))
    assert {"wgrad_dout", "wgrad_y1s", "dout_fp8", "dw2"} <= {*names[False]}
    assert {*names[False]} - {*names[True]} == {"wgrad_dout", "wgrad_y1s"}


def test_gradients_that_the_engine_cannot_read_are_refused_by_name(gaussian):
    dout = quantised(gaussian.dout)
    with pytest.raises(ConfigError, match=r"cannot read dout: gradients come as .* FP8 is off"):
        run(gaussian, EngineSettings(), dout)
    wide = EngineSettings(recipe=RECIPES["wide256"])
    with pytest.raises(ConfigError, match="recipe 'wide256' reads them in 1x256 blocks"):
        run(gaussian, wide, dout)
    assert np.isfinite(run(gaussian, wide, quantised(gaussian.dout, True)).dx).all()
    with pytest.raises(ShapeError, match=r"dout has shape \(159, 256\)"):
        run(gaussian, ISO128, quantised(gaussian.dout[:159]))
    with pytest.raises(
        DTypeError, match=r"dout is float8_e4m3fn without its scales; .* dout_source"
    ):
        run(gaussian, ISO128, dout.codes)


def test_each_engine_at_its_border(gaussian):
    """What the engines with kernels read, asked of the border that they share."""
    setup = set_up(gaussian, ISO128, torch.bfloat16)
    _, saved = setup.forward()
    blocks, row = (quantised(gaussian.dout, one) for one in (False, True))
    assert check_dout(blocks, saved, HOPPER) is blocks
    with pytest.raises(DTypeError, match=r"the hopper engine cannot read dout: .*'e4m3_row'"):
        check_dout(row, saved, HOPPER)
    with pytest.raises(DTypeError, match=r"the bf16 engine cannot read dout: .*'e4m3_1x128'"):
        check_dout(blocks, saved, BF16)
    assert gradient_problem(BF16, EngineSettings(), TokenFormat.PLAIN) is None


@pytest.mark.skipif(IS_PADDLE, reason="PyTorch's meta device stands in for another device")
def test_a_gradient_on_another_device_is_refused(gaussian):
    dout = quantised(gaussian.dout)
    elsewhere = tokens_of(dout.codes.to("meta"), dout.scale_inv.to("meta"))
    with pytest.raises(DeviceError, match="routing is on cpu but dout is on meta"):
        run(gaussian, ISO128, elsewhere)
