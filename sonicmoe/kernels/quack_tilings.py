"""Tilings of the BF16 grouped GEMMs for Blackwell: what one is, which of them quack-kernels can build
for a family of architectures, and the candidates among which `quack_gemm.choose_config` chooses.

Imports no framework and no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..architectures import ARCHITECTURES
from ..errors import ConfigError, expect

# Of these kernels rows of A are fetched by an index.
GATHERED = frozenset({"up", "up_again", "dgated", "wgrad"})


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

    @property
    def accumulators(self) -> int:
        """Registers of a consumer thread that hold sums: one warpgroup computes a tile when
        `pingpong`, two otherwise. On sm100 sums lie in tensor memory, not in registers.
        """
        # A warpgroup has 128 threads, and the sums of a tile are spread evenly over the threads
        # that compute it.
        return self.tile[0] * self.tile[1] // (128 if self.pingpong else 256)


# Candidates of a product, the fastest first, each with its time relative to the fastest.
Candidates = tuple[tuple[GemmConfig, float], ...]


@dataclass(frozen=True)
class GemmFamily:
    """One GEMM class of quack-kernels.

    Attributes:
        name: of the architectures that it is written for, as in `architectures.Architecture.family`.
        targets: families whose instructions include all that it uses. The class for sm120 multiplies
            with mma.sync and copies with TMA, which Hopper has too, so it can be run there.
        tile_rows: the M that a tile may have.
        clc_targets: families whose hardware hands out tiles.
        most_registers: of sums in one thread; None where they lie in tensor memory.
        candidates: by product.
    """

    name: str
    targets: tuple[str, ...]
    tile_rows: tuple[int, ...]
    clc_targets: tuple[str, ...]
    most_registers: int | None
    candidates: dict[str, Candidates]

    def problems(self, config: GemmConfig, target: str, *, gathered: bool) -> Iterator[str]:
        """Why this class cannot run a tiling on architectures of family `target`. quack asserts some
        of this while it traces, and some of it nowhere: a kernel would then hang, or add up wrong
        rows.
        """
        (rows, columns), (along_m, along_n) = config.tile, config.cluster
        if target not in self.targets:
            yield f"it is compiled for {target}, and the class of {self.name} runs on {' and '.join(self.targets)}"
        if rows not in self.tile_rows:
            yield f"its tile has {rows} rows; needed: one of {list(self.tile_rows)}"
        if columns % 32 or not 32 <= columns <= 512:
            yield f"its tile has {columns} columns; needed: a multiple of 32 up to 512, as gated stores take 32"
        if gathered and along_n != 1:
            yield f"its cluster has {along_n} blocks along N; needed: 1, because A is gathered"
        if config.clc and target not in self.clc_targets:
            yield f"tiles come from cluster launch control, which {target} does not have"
        if self.most_registers is not None and config.accumulators > self.most_registers:
            yield f"a thread holds {config.accumulators} sums; needed: at most {self.most_registers}"
        yield from self._own_problems(config, (along_m, along_n))

    def _own_problems(self, config: GemmConfig, cluster: tuple[int, int]) -> Iterator[str]:
        if self.name == "sm100":
            if config.pingpong:
                yield "it is pingpong, and one warp of a block multiplies on sm100"
            if config.tile[0] == 256 and cluster[0] % 2:
                yield f"its tile has 256 rows, which two blocks share, and its cluster has {cluster[0]} along M"
            # 512 columns of tensor memory; a pair of tiles lets one be stored while the other is
            # multiplied.
            if config.tile[1] > 256 and not (config.tile[0] == 256 and cluster[0] % 2 == 0):
                yield f"its tile has {config.tile[1]} columns; needed: at most 256 without a pair of blocks"
        if self.name == "sm120" and cluster != (1, 1):
            yield f"its cluster is {cluster}; needed: (1, 1), because these GPUs cannot share copies"


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
    targets=("sm100",),
    tile_rows=(128, 256),
    clc_targets=("sm100",),
    most_registers=None,
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
    targets=("sm120", "sm90"),
    tile_rows=(64, 128),
    clc_targets=("sm120",),
    most_registers=160,
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

_SERVED_BY: dict[str, str] = {
    known.name: known.family for known in ARCHITECTURES.values() if known.family in FAMILIES
}


def family_of(arch: str) -> str:
    """The family whose GEMM class serves an architecture.

    Raises:
        ConfigError: quack-kernels has none for it.
    """
    words = f"arch={arch!r} has no grouped GEMMs; needed: one of {list(_SERVED_BY)}"
    expect(arch in _SERVED_BY, ConfigError, words)
    return _SERVED_BY[arch]


@contextmanager
def served_by(arch: str, family: str) -> Iterator[None]:
    """Inside the block a family's class serves an architecture that may have none, in every thread.
    For tests, which run the class of a GPU that is not here on one that is.
    """
    previous = _SERVED_BY.copy()
    _SERVED_BY[arch] = FAMILIES[family].name
    try:
        yield
    finally:
        _SERVED_BY.clear()
        _SERVED_BY.update(previous)


def require_buildable(kernel: str, config: GemmConfig, family: str, arch: str) -> None:
    """Refuse a tiling that the class of `family` cannot run on `arch`.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    target = ARCHITECTURES[arch].family if arch in ARCHITECTURES else arch
    problems = list(FAMILIES[family].problems(config, target, gathered=kernel in GATHERED))
    words = f"the {family} GEMM of {kernel} cannot have {config} on {arch}: {'; '.join(problems)}"
    expect(not problems, ConfigError, words)
