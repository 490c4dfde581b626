"""How often a GEMM whose operands keep their scales along K has to rescale its sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..quant.recipes import Fp8Recipe
from ..quant.reference import quantize
from .cases import Case
from .golden_stages import RowLayout
from .step_capture import to_numpy
from .step_dump import Array

# Rows that see one change of scale together: those of a warp and of a warpgroup in a wgmma, and of
# a tile.
GROUPS = (16, 64, 128)


@dataclass(frozen=True)
class Steadiness:
    """One GEMM that gathers: "up" (x and w1) or "dgated" (dout and w2).

    own_tokens, own_weights: the share of blocks whose scale is not their line's.
    quiet_steps: the share of K-steps at which no scale changes, for as many rows of an expert as
    each of `GROUPS` and 128 columns. Without a step, in rows of one block, 1.
    """

    data: str
    recipe: str
    gemm: str
    own_tokens: float
    own_weights: float
    quiet_steps: tuple[float, ...]


def steadiness(case: Case, recipes: Iterable[Fp8Recipe]) -> Iterator[Steadiness]:
    """For every GEMM of the recipes in which both operands keep their scales."""
    layout = RowLayout.of(case.step(), alignment=max(GROUPS))
    for recipe in recipes:
        for gemm, tokens, weight, blocks in (
            ("up", case.x, case.w1, (recipe.x, recipe.w1)),
            ("dgated", case.dout, case.w2, (recipe.dout, recipe.w2_dgrad)),
        ):
            if not all(block.steady for block in blocks):
                continue
            scales, of_weight = (
                to_numpy(quantize(torch.tensor(array), block, scale_format=recipe.scale_format).scale_inv)
                for array, block in zip((tokens, weight), blocks, strict=True)
            )  # fmt: skip
            # K is the last axis of both, as the kernel reads them.
            of_weight = of_weight if gemm == "up" else of_weight.swapaxes(1, 2)
            quiet = tuple(_quiet(scales, of_weight, layout, rows) for rows in GROUPS)
            own = (_own(scales[served(layout)]), _own(of_weight))
            yield Steadiness(case.name, recipe.name, gemm, *own, quiet)


def served(layout: RowLayout) -> Array:
    """The token of every row that serves a slot."""
    return np.asarray(layout.fields["row_token"][layout.real])


def _own(scales: Array) -> float:
    """The share of blocks whose scale is not the largest along the last axis."""
    return float((scales != scales.max(-1, keepdims=True)).mean()) if scales.size else 0.0


def _quiet(scales: Array, of_weight: Array, layout: RowLayout, group: int) -> float:
    """The share of steps, over groups of rows and blocks of 128 columns, without a change."""
    changes, of_weight = (np.diff(one, axis=-1) != 0 for one in (scales, of_weight))
    if not changes.size:
        return 1.0
    token = layout.fields["row_token"]
    by_row = changes[token] & layout.real[:, None]
    by_group = by_row.reshape(-1, group, by_row.shape[1]).any(1)
    # A group of padding rows alone is no work.
    working = layout.real.reshape(-1, group).any(1)
    either = by_group[:, None] | of_weight[layout.row_expert[::group]]
    return float(1 - either[working].mean())
