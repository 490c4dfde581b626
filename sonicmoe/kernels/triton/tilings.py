"""The tiles of the Triton GEMMs per architecture: a table, chosen from by static sizes alone. A leaf
without Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PRODUCTS = ("up", "down", "dgated", "dgrad", "wgrad_down", "wgrad_up")


@dataclass(frozen=True)
class Tiling:
    """One way to compute a product.

    Attributes:
        m, n, k: a program computes m x n at a time and contracts over k; m divides 128 where M are
            rows of experts.
        warps, stages: of a program: its warps, and the tiles of operands that are under way.
        group: tiles along M for which programs take every tile along N, for reuse in L2.
        resident: programs that one multiprocessor runs at once, for callers who lend the GEMMs a
            part of the GPU.
        chunks: into which the epilogue cuts a tile along N, so that it fits into the registers.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    resident: int = 1
    chunks: int = 1

    def tiles(self, width: int) -> int:
        """Tiles along N of a result of `width` columns."""
        return -(-width // self.n)


Table = Mapping[str, tuple[Tiling, ...]]

# Per product the widest first; `choose_tiling` takes the one that computes the fewest columns beyond
# the result. The epilogue of dgated holds z, dz, y1s and the sums of dprobs beside the accumulator,
# and that of wgrad the old sums: they are cut into chunks. Triton counts the indices of a gather as
# a load of their own in front of the operand's, so wgrad's `stages` are two for each tile under way.
_WIDE = Tiling(128, 256, 64, 8, 3, group=4, chunks=2)
_SQUARE = Tiling(128, 128, 64, 8, 3, resident=2)
_WGRAD = (Tiling(128, 256, 64, 8, 6, group=16, chunks=2), Tiling(128, 128, 64, 8, 6, group=16))
_HOPPER: Table = {
    "up": (_WIDE, _SQUARE),
    "down": (_WIDE, _SQUARE),
    "dgated": (Tiling(128, 256, 64, 8, 3, chunks=8), Tiling(128, 128, 64, 8, 3, chunks=2)),
    "dgrad": (_WIDE, _SQUARE),
    "wgrad_down": _WGRAD,
    "wgrad_up": _WGRAD,
}


def _without_wgmma(stages: int) -> Table:
    square = Tiling(128, 128, 32, 8, stages)
    dgated = (replace(square, chunks=2), Tiling(128, 64, 32, 8, stages))
    wgrad = (replace(square, stages=6, chunks=2),)
    up = (square, Tiling(128, 64, 32, 8, stages))
    return {
        "up": up,
        "down": up,
        "dgated": dgated,
        "dgrad": up,
        "wgrad_down": wgrad,
        "wgrad_up": wgrad,
    }


# 164 KB of shared memory on 8.0; 100 KB on 8.6, 8.9 and 12.x.
_AMPERE, _ADA = _without_wgmma(5), _without_wgmma(4)
TILINGS: Mapping[str, Table] = {
    "sm_80": _AMPERE,
    "sm_86": _ADA,
    "sm_89": _ADA,
    "sm_90a": _HOPPER,
}


def tilings(arch: str) -> Table:
    """The table of an architecture; one that has none is given the smallest tiles, which fit
    everywhere.
    """
    return TILINGS.get(arch, _ADA)


def choose_tiling(product: str, width: int, arch: str) -> Tiling:
    """The tiling of a product with so many columns: the least that are computed, and of equal ones
    the widest. A pure function of static sizes, so that every process has the same bits and keys.
    """
    found = tilings(arch)[product]
    return min(found, key=lambda tiling: (tiling.tiles(width) * tiling.n, -tiling.n))
