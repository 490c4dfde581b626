"""Which operand is quantised with which block: the FP8 recipe. Pure data, no framework.

Shapes are logical: activations `[tokens, features]`, weights in their native layout `w1 [N1, H]`, `w2 [H, I]`.
A GEMM contracts over one axis of each operand; a row scale `rows(B)` runs along the contraction axis, an isotropic block
`iso(B)` is the same in both orientations, so one quantisation serves two GEMMs and transposing moves bytes only.
docs/numerics.md has the measurements behind the default.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum


class ScaleFormat(Enum):
    """`FP32`: amax maps onto the code's largest value; `POW2`: the next power of two above that (UE8M0-compatible)."""

    FP32 = "fp32"
    POW2 = "pow2"


@dataclass(frozen=True, order=True)
class BlockShape:
    """Extent of one scale: `rows` x `cols` elements of the logical matrix."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        """Refuse empty blocks."""
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"a block needs at least one row and one column, got {self.rows}x{self.cols}")

    @property
    def transposed(self) -> BlockShape:
        """The same block on the transposed matrix."""
        return BlockShape(self.cols, self.rows)

    @property
    def isotropic(self) -> bool:
        """Whether transposing leaves the block unchanged."""
        return self.rows == self.cols

    def __str__(self) -> str:
        """`1x128`."""
        return f"{self.rows}x{self.cols}"


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

    x, dout, y1, dz:    A operands `[tokens, features]`, contracted over features
    w1, w2:             native weights as forward reads them, contracted over their columns
    w1_dgrad, w2_dgrad: the same logical matrices as dgrad reads them, contracted over their rows
    wgrad_*:            `[tokens, features]`, contracted over tokens, in expert order, each expert padded to `row_alignment`
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
    note: str = ""

    @property
    def shares_weight_buffers(self) -> bool:
        """Whether forward and dgrad can read one FP8 buffer per weight (`iso_weight`)."""
        return all(block.isotropic for block in (self.w1, self.w2)) and (self.w1, self.w2) == (
            self.w1_dgrad,
            self.w2_dgrad,
        )

    @property
    def shares_dz(self) -> bool:
        """Whether dgrad and wgrad read the same quantisation of dz."""
        return self.dz == self.wgrad_dz and self.dz.isotropic

    @property
    def row_alignment(self) -> int:
        """Rows every expert is padded to, so that no block of rows spans two experts: at least the GEMM tile (128)."""
        return max(128, *(block.rows for block in self.token_blocks()))

    def token_blocks(self) -> tuple[BlockShape, ...]:
        """Blocks of all expert-ordered operands."""
        return (self.y1, self.dz, self.wgrad_x, self.wgrad_dz, self.wgrad_dout, self.wgrad_y1s, self.z)

    def with_scales(self, scale_format: ScaleFormat) -> Fp8Recipe:
        """The same blocks with another scale format; the name gains a `-pow2` suffix where it applies."""
        suffix = "-pow2" if scale_format is ScaleFormat.POW2 else ""
        return dataclasses.replace(self, name=self.name.removesuffix("-pow2") + suffix, scale_format=scale_format)


def row_recipe(size: int) -> Fp8Recipe:
    """1xB along the contraction everywhere: the DeepSeek-V3 activation recipe, applied to the weights as well."""
    along_k, along_tokens = rows(size), columns(size)
    return Fp8Recipe(
        name=f"1x{size}",
        x=along_k, y1=along_k, dout=along_k, dz=along_k,
        w1=along_k, w2=along_k, w1_dgrad=along_tokens, w2_dgrad=along_tokens,
        wgrad_x=along_tokens, wgrad_dz=along_tokens, wgrad_dout=along_tokens, wgrad_y1s=along_tokens,
        note="one scale per row and 128 of the contraction, for every operand",
    )  # fmt: skip


def iso_recipe(size: int) -> Fp8Recipe:
    """BxB blocks wherever a tensor is used in both orientations; gathered A operands keep row scales."""
    block = iso(size)
    return Fp8Recipe(
        name=f"iso{size}",
        x=rows(size), y1=block, dout=rows(size), dz=block,
        w1=block, w2=block, w1_dgrad=block, w2_dgrad=block,
        wgrad_x=block, wgrad_dz=block, wgrad_dout=block, wgrad_y1s=block,
        note="gathered operands (x, dout) per row; weights, y1, dz and all wgrad operands in square blocks",
    )  # fmt: skip


def mixed_recipe() -> Fp8Recipe:
    """Row scales over 512 of K for the gathered operands, 128x128 blocks elsewhere."""
    return dataclasses.replace(
        iso_recipe(128), name="mixed", x=rows(512), dout=rows(512), y1=rows(128),
        note="gathered operands per row and 512 of K, y1 per row and 128, everything else 128x128",
    )  # fmt: skip


BASE_RECIPES: tuple[Fp8Recipe, ...] = (
    row_recipe(128),
    iso_recipe(128),
    iso_recipe(256),
    iso_recipe(512),
    mixed_recipe(),
)
RECIPES: dict[str, Fp8Recipe] = {
    recipe.name: recipe
    for base in BASE_RECIPES
    for recipe in (base, base.with_scales(ScaleFormat.POW2))
}  # fmt: skip
DEEPSEEK_V3 = RECIPES["1x128"]
