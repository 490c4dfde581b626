"""FP8 emulation: every quantisation point is there, and nowhere else. How large errors are, tests/oracle
bounds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine.fp8_by_hand import (
    AFFECTS,
    assert_equal_to_rounding,
    by_hand,
    coarse_problem,
    distance,
)
from engine.moe_golden import OUTPUTS, assert_same_bits, make_problem, run_engine
from framework import torch
from pairwise import pairwise

from sonicmoe.engine.activations import activate_backward
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference_operands import saved_z, values_of
from sonicmoe.enums import ACTIVATIONS, ActivationType, ZCode
from sonicmoe.quant.recipes import BASE_RECIPES, RECIPES, ScaleFormat

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


@pytest.mark.parametrize("recipe", BASE_RECIPES, ids=lambda r: r.name)
def test_rows_are_padded_so_that_no_block_spans_two_experts(recipe):
    """What one expert's tokens hold cannot change another expert's gradient, whatever the blocks."""
    problem = make_problem(tokens=60, experts=2, topk=1, empty=())
    problem = problem.but(indices=np.arange(60).reshape(-1, 1) % 2)
    loud = problem.but(x=np.where(problem.indices == 1, 1000.0, 1.0) * problem.x)
    settings = EngineSettings(recipe=recipe)
    quiet_result, loud_result = run_engine(problem, settings), run_engine(loud, settings)
    assert_same_bits(loud_result, quiet_result, ("dw1", "dw2"), slice(1))
    assert_same_bits(loud_result, quiet_result, ("out", "dx"), slice(None, None, 2))
