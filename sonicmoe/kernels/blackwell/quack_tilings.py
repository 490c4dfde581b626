"""Tilings of the BF16 grouped GEMMs for Blackwell: what one is, and for a family of architectures
the candidates among which `quack_gemm.choose_config` chooses.

Imports no framework and no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...architectures import ARCHITECTURES
from ...errors import ConfigError, expect


@dataclass(frozen=True)
class GemmConfig:
    """One tiling: the tile of a thread block, or on sm100 of the pair of blocks that multiply
    together; blocks of a cluster along M and N; two consumers on two tiles or on one.

    swizzle: tiles along N that consecutive clusters take before the next along M, for reuse in L2.
    clc: blocks ask the hardware for their next tile (cluster launch control) instead of taking
    every n-th one.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    swizzle: int = 8
    clc: bool = False

    @property
    def statics(self) -> dict[str, Any]:
        """What of it is compiled in."""
        return {
            "tile": self.tile,
            "cluster": self.cluster,
            "pingpong": self.pingpong,
            "swizzle": self.swizzle,
            "clc": self.clc,
        }

    def tiles(self, width: int) -> int:
        """Tiles across a result of `width` columns."""
        return -(-width // self.tile[1])

    # The kernel computes whole clusters of whole tiles, so a width that no tile divides pays for
    # columns that nobody reads. `choose_config` weighs this waste against the speed of the tile.
    def columns(self, width: int) -> int:
        """Columns computed for a result of `width`, the surplus of the last cluster included."""
        return -(-self.tiles(width) // self.cluster[1]) * self.cluster[1] * self.tile[1]


# Candidates of a product, the fastest first, each with its time relative to the fastest.
Candidates = tuple[tuple[GemmConfig, float], ...]


@dataclass(frozen=True)
class GemmFamily:
    """One GEMM class of quack-kernels.

    Attributes:
        name: of the architectures that it is written for, as in `architectures.Architecture.family`.
        clc_targets: families whose hardware hands out tiles.
        candidates: by product.
    """

    name: str
    clc_targets: tuple[str, ...]
    candidates: dict[str, Candidates]


# In the order of a training step.
PRODUCTS = ("up", "down", "dgated", "dgrad", "wgrad_down", "wgrad_up")

# Nobody has timed these families with this package. The first tiling of a product is quack's own
# default, but for sm120's weight gradients. Narrower ones are for widths that the first does not
# divide. Their times are guesses: a tile of M x N reads 1 / M + 1 / N operands per product, and most
# of that hides behind the products.
_SM100_ALL: Candidates = (
    (GemmConfig((256, 256), clc=True), 1.00),
    (GemmConfig((256, 192), clc=True), 1.02),
    (GemmConfig((256, 128), clc=True), 1.05),
)
_SM100 = GemmFamily(
    "sm100",
    clc_targets=("sm100",),
    candidates=dict.fromkeys(PRODUCTS, _SM100_ALL),
)

_SM120_NARROW = GemmConfig((128, 64), cluster=(1, 1), pingpong=True, clc=True)
_SM120_ROWS: Candidates = (
    (GemmConfig((128, 128), cluster=(1, 1), pingpong=True, clc=True), 1.00),
    (_SM120_NARROW, 1.05),
)
# Pingpong spills where halves of up are stored. One tile for both consumers costs little here,
# because the loop over the rows of an expert is long beside the epilogue.
_SM120_WGRAD: Candidates = (
    (GemmConfig((128, 128), cluster=(1, 1), clc=True), 1.00),
    (_SM120_NARROW, 1.05),
)
_SM120 = GemmFamily(
    "sm120",
    clc_targets=("sm120",),
    candidates={
        "up": _SM120_ROWS,
        "down": _SM120_ROWS,
        # At 128 x 128 it spills; quack's default is this one too.
        "dgated": ((_SM120_NARROW, 1.00),),
        "dgrad": _SM120_ROWS,
        "wgrad_down": _SM120_WGRAD,
        "wgrad_up": _SM120_WGRAD,
    },
)

FAMILIES: dict[str, GemmFamily] = {family.name: family for family in (_SM100, _SM120)}

# The architectures that a class serves, each with its family.
SERVED_BY: dict[str, str] = {
    known.name: known.family for known in ARCHITECTURES.values() if known.family in FAMILIES
}


def family_of(arch: str) -> str:
    """The family whose GEMM class serves an architecture.

    Raises:
        ConfigError: quack-kernels has none for it.
    """
    words = f"arch={arch!r} has no grouped GEMMs; needed: one of {list(SERVED_BY)}"
    expect(arch in SERVED_BY, ConfigError, words)
    return SERVED_BY[arch]
