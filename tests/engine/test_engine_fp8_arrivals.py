"""Tokens, and gradients of the output, that arrive in FP8: read as they came, rounded a second time
for wgrad alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.fp8_arrivals import (
    EXACT,
    ISO128,
    WGRADS,
    arrived_by_hand,
    gaussian_problem,
    odd_multiples,
    quantised,
    run,
)
from engine.fp8_by_hand import assert_equal_to_rounding, coarse_problem
from engine.moe_golden import OUTPUTS, assert_same_bits, golden, set_up
from framework import relative_rmse, torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.errors import ConfigError, DTypeError, ShapeError
from sonicmoe.quant.recipes import RECIPES

# The weight gradient that reads this side's values, and the operands of its product.
GRADIENT = {"x": "dw1", "dout": "dw2"}
SIDES = pytest.mark.parametrize("side", GRADIENT)
WIDE = EngineSettings(recipe=RECIPES["wide256"])


@pytest.fixture(scope="module")
def coarse():
    return coarse_problem()


@pytest.fixture(scope="module")
def gaussian():
    return gaussian_problem()


def arriving(problem, side):
    return {side: quantised(getattr(problem, side))}


@SIDES
def test_the_senders_quantisation_is_the_engines_own(gaussian, side):
    """Equal codes, equal bits: all but the gradient whose operand was rounded once here. It is
    rounded once more.
    """
    name, plain = GRADIENT[side], run(gaussian, ISO128)
    sent = run(gaussian, ISO128, **arriving(gaussian, side))
    assert_same_bits(sent, plain, names={*OUTPUTS} - {name})
    exact = getattr(golden(gaussian), name)
    once, twice = (relative_rmse(getattr(r, name), exact) for r in (plain, sent))
    assert 1.03 * once < twice < 1.12 * once


@WGRADS
@pytest.mark.parametrize("sides", [("x",), ("dout",), ("x", "dout")], ids="+".join)
def test_equals_the_recipe_by_hand(coarse, fp8_wgrad, sides):
    """Powers of two and small integers: every number is exact, so codes, blocks and order show."""
    settings = replace(EXACT, fp8_wgrad=fp8_wgrad)
    sent = {side: odd_multiples(getattr(coarse, side)) for side in sides}
    expected = arrived_by_hand(coarse, settings, **sent)
    assert_equal_to_rounding(run(coarse, settings, **sent), expected)


def test_saved_tensors_hold_codes_and_scales(gaussian):
    x = quantised(gaussian.x)
    setup = replace(set_up(gaussian, ISO128, torch.bfloat16), x=x)
    out, saved = setup.forward()
    tensors, spec = saved.pack()
    assert spec.given == 2 and tensors[0] is x.codes and tensors[1] is x.scale_inv
    assert not any(isinstance(value, torch.Tensor) for value in spec)
    assert_same_bits(setup.backward(out, spec.unpack(tensors)), run(gaussian, ISO128, x=x))


OFF = EngineSettings()
REFUSED = {
    "x, FP8 is off": ("x", OFF, {}, ConfigError, "FP8 is off; needed: the values in bfloat16"),
    "dout, FP8 is off": ("dout", OFF, {}, ConfigError, "cannot read dout: gradients come as .* FP8 is off"),
    "x, other blocks": ("x", WIDE, {}, ConfigError, "recipe 'wide256' reads them in 1x256 blocks"),
    "dout, other blocks": ("dout", WIDE, {}, ConfigError, "recipe 'wide256' reads them in 1x256 blocks"),
    "x, shape": ("x", ISO128, {"rows": 159}, ShapeError, r"x has shape \(159, 256\)"),
    "dout, shape": ("dout", ISO128, {"rows": 159}, ShapeError, r"dout has shape \(159, 256\)"),
    "x, codes": ("x", ISO128, {"codes": True}, DTypeError, "x is float8_e4m3fn; needed: bfloat16"),
    "dout, codes": ("dout", ISO128, {"codes": True}, DTypeError, "dout is float8_e4m3fn without its scales; .* dout_source"),
}  # fmt: skip


@pytest.mark.parametrize(("side", "settings", "form", "error", "words"), REFUSED.values(), ids=REFUSED)  # fmt: skip
def test_what_the_engine_cannot_read_is_refused_by_name(
    gaussian, side, settings, form, error, words
):
    sent = quantised(getattr(gaussian, side)[: form.get("rows")])
    with pytest.raises(error, match=words):
        run(gaussian, settings, **{side: sent.codes if "codes" in form else sent})
