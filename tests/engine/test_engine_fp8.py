"""FP8 emulation: every quantisation point is there, and nowhere else; tokens and gradients that arrive in FP8
are read as they came, and rounded a second time for wgrad alone. How large errors are, tests/oracle bounds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine.fp8_arrivals import quantised
from engine.fp8_arrivals import run as run_arrived
from engine.fp8_by_hand import AFFECTS, assert_equal_to_rounding, by_hand, coarse_problem, distance
from engine.moe_golden import OUTPUTS, run_engine
from framework import numpy, tensor, torch
from pairwise import pairwise

from sonicmoe.engine.activations import activate_backward
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference_operands import saved_z, values_of
from sonicmoe.enums import ACTIVATIONS, ActivationType, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.quant.recipes import BASE_RECIPES, RECIPES, ScaleFormat
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import tokens_of

POW2 = [recipe.with_scales(ScaleFormat.POW2) for recipe in BASE_RECIPES]
DX256 = RECIPES["dx256"]
CLAMP, OAI = ActivationType.SWIGLU_CLAMP, ActivationType.SWIGLU_OAI


@pytest.fixture(scope="module")
def coarse():
    return coarse_problem()


def assert_by_hand(problem, settings, dtype=torch.float32, exact=True):
    expected = by_hand(problem, settings, dtype, exact=exact)
    assert_equal_to_rounding(run_engine(problem, settings, dtype), expected)


@pytest.mark.parametrize("recipe", POW2, ids=lambda r: r.name)
def test_equals_the_recipe_by_hand_to_fp32_rounding(coarse, recipe):
    assert_by_hand(coarse, EngineSettings(ActivationType.REGLU, recipe))


@pytest.mark.parametrize(
    ("save_z", "fp8_wgrad", "dtype"),
    pairwise(tuple(ZCode), (True, False), ("float32", "bfloat16")),
    ids=str,
)
def test_every_setting_equals_the_recipe_by_hand(coarse, save_z, fp8_wgrad, dtype):
    settings = EngineSettings(ActivationType.REGLU, RECIPES["iso128-pow2"], fp8_wgrad, save_z)
    assert_by_hand(coarse, settings, getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_recipe_operands_have_the_dtype_of_the_tokens(dtype):
    small = coarse_problem(tokens=40, hidden=24, intermediate=16)
    fp16 = 2.0**-7  # fp16 ends at 65504
    small = small.but(up_gate=small.up_gate * fp16, down=small.down * fp16)
    settings = EngineSettings(ActivationType.REGLU)
    assert_by_hand(small, settings, getattr(torch, dtype), exact=False)


@pytest.mark.parametrize("point", AFFECTS)
def test_every_quantisation_point_shows(coarse, point):
    """Leaving one point out moves exactly the outputs it feeds: the engine quantises there, and the
    tests above would notice.
    """
    settings = EngineSettings(ActivationType.REGLU, RECIPES["1x128-pow2"])
    actual = run_engine(coarse, settings)
    without = by_hand(coarse, settings, torch.float32, skip=[point])
    moved = {name for name in OUTPUTS if distance(without, actual, name) > 1e-3}
    equal = {name for name in OUTPUTS if distance(without, actual, name) < 1e-6}
    assert moved == AFFECTS[point]
    assert equal == set(OUTPUTS) - AFFECTS[point]


@pytest.mark.parametrize(
    ("activation", "own"),
    [(CLAMP, ()), (CLAMP, (("limit", 7.3),)), (OAI, ()), (OAI, (("limit", 5.3),))],
    ids=str,
)
@pytest.mark.parametrize("code", list(ZCode), ids=lambda z: z.value)
def test_a_kept_z_stays_on_its_side_of_a_clamp(activation, own, code):
    """Rounded to the nearest value, dz would be off by 3 to 6 % at z of this size."""
    settings = EngineSettings(activation, DX256, save_z=code, activation_parameters=own)
    torch.manual_seed(0)
    z, dy1 = torch.randn(256, 512) * 6.0, torch.randn(256, 256)
    limit = ACTIVATIONS[activation].values(own)["limit"]
    z[::7, 3], z[3::7, 2] = -limit, limit  # a bound passes the gradient
    kept = values_of(saved_z(z, settings, torch.bfloat16))
    sides = [torch.where(torch.arange(512) % 2 > 0, v.abs(), v) > limit for v in (z, kept)]
    assert bool((sides[0] == sides[1]).all()) and float((kept - z).norm() / z.norm()) < 0.03
    dz, wanted = (activate_backward(v, dy1, activation, own)[1] for v in (kept, z))
    bound = {ZCode.ADAPTIVE: 0.015, ZCode.INT8: 0.015, ZCode.E4M3: 0.03, ZCode.BF16: 0.002}
    assert float((dz - wanted).norm() / wanted.norm()) < bound[code]
    z[5, 4:8] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    lost = values_of(saved_z(z, settings, torch.bfloat16))[5]
    assert not lost[4:8].isfinite().any()


# ---- tokens and gradients that arrive in FP8 ----


def odd_multiples(x):
    """Tokens whose scales are small odd multiples of powers of two: their values need more bits
    than a code has, and stay exact in fp32.
    """
    made = quantised(np.sign(x) * (np.abs(x) % 4), ScaleFormat.POW2)
    scale = numpy(made.scale_inv)
    odd = 1 + 2 * (np.arange(scale.size).reshape(scale.shape) % 4)
    return tokens_of(made.codes, tensor(scale * odd, torch.float32))


@pytest.mark.parametrize("fp8_wgrad", [True, False])
@pytest.mark.parametrize("sides", [("x",), ("dout",), ("x", "dout")], ids="+".join)
def test_what_arrives_in_fp8_is_quantised_again_for_wgrad_alone(coarse, fp8_wgrad, sides):
    """Powers of two and small integers: every number is exact, so codes, blocks and order show."""
    settings = EngineSettings(ActivationType.REGLU, RECIPES["iso128-pow2"], fp8_wgrad)
    sent = {side: odd_multiples(getattr(coarse, side)) for side in sides}
    seen = coarse.but(**{side: numpy(dequantize(q)) for side, q in sent.items()})
    expected = by_hand(seen, settings, torch.bfloat16, skip=sides, exact=True)
    assert_equal_to_rounding(run_arrived(coarse, settings, **sent), expected)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [(None, "gradients come as .* FP8 is off"), ("wide256", "recipe 'wide256' reads them in 1x256 blocks")],
)  # fmt: skip
def test_a_gradient_that_the_engine_cannot_read_is_refused(coarse, recipe, words):
    settings = EngineSettings(recipe=RECIPES.get(recipe))
    with pytest.raises(ConfigError, match=f"cannot read dout: .*{words}"):
        run_arrived(coarse, settings, dout=quantised(coarse.dout))
