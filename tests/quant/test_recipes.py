"""Recipes: consistent blocks, and the facts engines derive from them."""

import dataclasses

import pytest

from sonicmoe.enums import RECIPE_NAMES
from sonicmoe.quant.recipes import (
    DEEPSEEK_V3,
    MXFP8,
    RECIPES,
    Fp8Recipe,
    ScaleFormat,
    columns,
    iso,
    rows,
)

BLOCK_FIELDS = [field.name for field in dataclasses.fields(Fp8Recipe) if field.type == "BlockShape"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def blocks_of(recipe, *names):
    return {getattr(recipe, name) for name in names}


@every_recipe
def test_every_recipe_has_a_name_and_both_scale_formats(recipe):
    assert tuple(RECIPES) == RECIPE_NAMES and len(BLOCK_FIELDS) == 13
    assert RECIPES[recipe.name] is recipe
    assert recipe.name.endswith("-pow2") == (recipe.scale_format is ScaleFormat.POW2)
    for scale_format in ScaleFormat:
        twin = recipe.with_scales(scale_format)
        assert RECIPES[twin.name] == twin
        assert all(getattr(twin, name) == getattr(recipe, name) for name in BLOCK_FIELDS)
    back = recipe.with_scales(ScaleFormat.POW2).with_scales(ScaleFormat.FP32)
    assert back.name == recipe.name.removesuffix("-pow2")


@every_recipe
def test_blocks_of_every_recipe(recipe):
    """No block of rows spans two experts, z has one scale per row and 128, no promotion of a product falls
    inside a block, and one product of scales serves a k-block of a weight gradient.
    """
    assert recipe.row_alignment >= 128
    assert all(recipe.row_alignment % block.rows == 0 for block in recipe.token_blocks())
    assert recipe.z == rows(128)
    pairs = [
        (recipe.x.cols, recipe.w1.cols),
        (recipe.y1.cols, recipe.w2.cols),
        (recipe.dout.cols, recipe.w2_dgrad.rows),
        (recipe.dz.cols, recipe.w1_dgrad.rows),
    ]
    assert all(max(pair) % min(pair) == 0 for pair in pairs)
    assert recipe.wgrad_x.rows == recipe.wgrad_dz.rows
    assert recipe.wgrad_dout.rows == recipe.wgrad_y1s.rows


@every_recipe
def test_gathered_operands_are_scaled_per_row(recipe):
    """x and dout are quantised once per token and gathered afterwards: a block of several rows
    would mix experts. `iso32` quantises them after the gather, once for both products.
    """
    square = recipe.name.startswith("iso32")
    assert {recipe.in_expert_order("x"), recipe.in_expert_order("dout")} == {square}
    if square:
        assert (recipe.x, recipe.dout) == (recipe.wgrad_x, recipe.wgrad_dout)
    else:
        assert recipe.x.rows == recipe.dout.rows == 1


def test_deepseek_v3_has_strips_for_activations_and_square_weight_blocks():
    """arXiv:2412.19437, section 3.3.2: 1x128 tiles for activations, 128x128 blocks for weights."""
    assert blocks_of(DEEPSEEK_V3, "x", "y1", "dout", "dz") == {rows(128)}
    wgrad = blocks_of(DEEPSEEK_V3, "wgrad_x", "wgrad_dz", "wgrad_dout", "wgrad_y1s")
    assert wgrad == {columns(128)}
    assert blocks_of(DEEPSEEK_V3, "w1", "w2", "w1_dgrad", "w2_dgrad") == {iso(128)}
    assert DEEPSEEK_V3.scale_format is ScaleFormat.FP32


def test_mxfp8_has_scales_of_one_byte_for_every_32_of_the_contraction():
    """OCP Microscaling Formats 1.0, section 5.3. The scales of `iso32-pow2` are those of a block
    repeated, so that one set of codes is an MXFP8 matrix in both orientations.
    """
    assert MXFP8.scale_format is ScaleFormat.POW2
    assert blocks_of(MXFP8, "x", "y1", "dout", "dz", "w1", "w2") == {rows(32)}
    assert blocks_of(MXFP8, "wgrad_x", "wgrad_dz", "w1_dgrad", "w2_dgrad") == {columns(32)}
    iso32 = RECIPES["iso32-pow2"]
    assert iso32.shares_weight_buffers and iso32.dz == iso32.wgrad_dz and iso32.y1 == MXFP8.y1
    assert iso32.rounds_rows and MXFP8.rounds_rows
    assert blocks_of(iso32, *BLOCK_FIELDS) - {iso32.y1, iso32.z} == {iso(32)}
