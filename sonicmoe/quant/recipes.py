"""The FP8 recipes: the block in which each operand is quantised. Pure data, no framework.

Shapes are logical: activations `[tokens, features]`, weights in their native layout `w1 [N1, H]`,
`w2 [H, I]`. A GEMM contracts over one axis of each operand, and a row scale `rows(B)` runs along
that axis. A square block serves two GEMMs that contract over different axes, because transposing
its codes and scales only moves bytes. docs/numerics.md has the measurements behind the default.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from enum import Enum


class ScaleFormat(Enum):
    """`FP32`: amax maps onto the code's largest value; `POW2`: the next power of two above that
    (UE8M0-compatible).
    """

    FP32 = "fp32"
    POW2 = "pow2"


@dataclass(frozen=True)
class BlockShape:
    """Extent of one scale: `rows` x `cols` elements of the logical matrix."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(
                f"a block needs at least one row and one column, got {self.rows}x{self.cols}"
            )

    @property
    def transposed(self) -> BlockShape:
        return self if self.isotropic else BlockShape(self.cols, self.rows)

    @property
    def isotropic(self) -> bool:
        """Whether transposing leaves the block unchanged."""
        return self.rows == self.cols

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@functools.lru_cache(maxsize=64)  # asked several times in every forward
def rows(size: int) -> BlockShape:
    """One scale per row and `size` columns."""
    return BlockShape(1, size)


def columns(size: int) -> BlockShape:
    """One scale per column and `size` rows."""
    return BlockShape(size, 1)


def iso(size: int) -> BlockShape:
    """One scale per `size` x `size` block."""
    return BlockShape(size, size)


@dataclass(frozen=True)
class Fp8Recipe:
    """Block shape of every FP8 operand of forward, dgrad and wgrad.

    x, dout, y1, dz:    A operands `[tokens, features]`, contracted over features; see `in_expert_order`
    w1, w2:             native weights as forward reads them, contracted over their columns
    w1_dgrad, w2_dgrad: the same logical matrices as dgrad reads them, contracted over their rows
    wgrad_*:            `[tokens, features]`, contracted over tokens, in expert order, each expert padded to `row_alignment`
    rounds_rows:        dz and y1s leave their GEMM in the dtype of the tokens, and are quantised from there
    """

    name: str
    x: BlockShape
    y1: BlockShape
    dout: BlockShape
    dz: BlockShape
    w1: BlockShape
    w2: BlockShape
    w1_dgrad: BlockShape
    w2_dgrad: BlockShape
    wgrad_x: BlockShape
    wgrad_dz: BlockShape
    wgrad_dout: BlockShape
    wgrad_y1s: BlockShape
    z: BlockShape = BlockShape(1, 128)
    scale_format: ScaleFormat = ScaleFormat.FP32
    rounds_rows: bool = False

    @property
    def shares_weight_buffers(self) -> bool:
        """Whether forward and dgrad can read one FP8 buffer per weight (`iso_weight`): equal
        blocks, so transposing rounds nothing.
        """
        return (self.w1, self.w2) == (self.w1_dgrad, self.w2_dgrad)

    def in_expert_order(self, tokens: str) -> bool:
        """Whether `tokens` ("x" or "dout") are quantised after the gather and not before it: a
        block of several rows exists in expert order only. Their codes then serve wgrad too.
        """
        block: BlockShape = getattr(self, tokens)
        return block.rows > 1

    @functools.cached_property
    def row_alignment(self) -> int:
        """Rows every expert is padded to, so that no block of rows spans two experts: at least the
        GEMM tile (128).
        """
        # A block that reached into the next expert would let one expert's values decide the scale
        # of another's.
        return max(128, *(block.rows for block in self.token_blocks()))

    def token_blocks(self) -> tuple[BlockShape, ...]:
        """Blocks of all expert-ordered operands."""
        wgrad = self.wgrad_x, self.wgrad_dz, self.wgrad_dout, self.wgrad_y1s
        return (self.y1, self.dz, *wgrad, self.z)

    def with_scales(self, scale_format: ScaleFormat) -> Fp8Recipe:
        """The recipe of these blocks with another scale format; the name gains a `-pow2` suffix where it
        applies.
        """
        suffix = "-pow2" if scale_format is ScaleFormat.POW2 else ""
        name = self.name.removesuffix("-pow2") + suffix
        return dataclasses.replace(self, name=name, scale_format=scale_format)


def row_recipe(size: int) -> Fp8Recipe:
    """1xB along the contraction everywhere, weights included."""
    # A operands and forward's weights are contracted over their columns; operands of wgrad over
    # tokens and dgrad's weights over their rows, both the first axis.
    along_k, along_tokens = rows(size), columns(size)
    return Fp8Recipe(
        name=f"1x{size}",
        x=along_k, y1=along_k, dout=along_k, dz=along_k,
        w1=along_k, w2=along_k, w1_dgrad=along_tokens, w2_dgrad=along_tokens,
        wgrad_x=along_tokens, wgrad_dz=along_tokens, wgrad_dout=along_tokens, wgrad_y1s=along_tokens,
    )  # fmt: skip


def iso_recipe(size: int) -> Fp8Recipe:
    """BxB blocks wherever a tensor is used in both orientations; x, dout and y1, read in one only,
    keep row scales.
    """
    block, along_k = iso(size), rows(size)
    return Fp8Recipe(
        name=f"iso{size}",
        x=along_k, y1=along_k, dout=along_k, dz=block,
        w1=block, w2=block, w1_dgrad=block, w2_dgrad=block,
        wgrad_x=block, wgrad_dz=block, wgrad_dout=block, wgrad_y1s=block,
    )  # fmt: skip


def wide_recipe(size: int) -> Fp8Recipe:
    """`dx256` with one promotion every `size` of the contraction in both GEMMs that gather, too: x and
    dout per row and `size` of K, weights to match.
    """
    w1, w2 = BlockShape(256, size), BlockShape(size, 128)
    return dataclasses.replace(
        _DX256, name=f"wide{size}", x=rows(size), dout=rows(size), w1=w1, w1_dgrad=w1, w2=w2, w2_dgrad=w2
    )  # fmt: skip


# arXiv:2412.19437, section 3.3.2: 1x128, but weights in 128x128 blocks.
DEEPSEEK_V3 = dataclasses.replace(
    row_recipe(128), name="deepseek-v3", w1=iso(128), w2=iso(128), w1_dgrad=iso(128), w2_dgrad=iso(128)
)  # fmt: skip
# MXFP8, which has one power-of-two scale per 32 of the contraction, with codes that serve both
# orientations: x and dout in expert order, y1 per row.
_ISO32 = dataclasses.replace(iso_recipe(32), x=iso(32), dout=iso(32), rounds_rows=True)
# dz [tokens, N1] contracts over N1 in the dx GEMM, and w1 [N1, H] over its rows, so the 256 lies
# along different axes of the two.
_WIDE = BlockShape(128, 256)
_DX256 = dataclasses.replace(
    iso_recipe(128), name="dx256", dz=_WIDE, wgrad_dz=_WIDE, w1=_WIDE.transposed, w1_dgrad=_WIDE.transposed
)  # fmt: skip
BASE_RECIPES: tuple[Fp8Recipe, ...] = (
    DEEPSEEK_V3,
    row_recipe(128),
    # Fed from rows in the dtype of the tokens, as the GEMMs of this format leave them.
    dataclasses.replace(row_recipe(32), rounds_rows=True),
    _ISO32,
    iso_recipe(128),
    iso_recipe(256),
    _DX256,
    wide_recipe(256),
    wide_recipe(512),
)
# Every block layout exists with both scale formats.
RECIPES: dict[str, Fp8Recipe] = {
    recipe.name: recipe
    for base in BASE_RECIPES
    for recipe in (base, base.with_scales(ScaleFormat.POW2))
}  # fmt: skip
# OCP MXFP8 for every operand. Its scales of one byte (UE8M0) are powers of two.
MXFP8 = RECIPES["1x32-pow2"]
