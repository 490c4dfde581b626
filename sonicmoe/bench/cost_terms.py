"""The terms a cost model may be made of, each a function of sizes. numpy only.

Rows are counted as the kernels see them: every expert's rows padded to tiles of 128, in the mean
over uniform routing. The roofline term adds up the best time of each stage: the larger of its
operations in full waves of tiles, at the rate of the best public GEMM, and its least traffic at
copy bandwidth. It is a fixed function of sizes, and the fit finds its coefficient only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .floors import BACKWARD_STAGES, COPY_BYTES_PER_S, FORWARD_STAGES, gemm_tflops, stage_bytes
from .shapes import Shape

Array = np.ndarray
TILE_ROWS, TILE_COLUMNS = 128, 256
MULTIPROCESSORS = 132  # of H100 and H200 SXM
TAIL = 5.0  # standard deviations of an expert's rows that are looked at


@dataclass(frozen=True, eq=False)
class Columns:
    """Sizes of N points as fp64 `[N]` arrays. `fp8`: operands have one byte instead of two."""

    rows: Array
    hidden: Array
    intermediate: Array
    experts: Array
    tokens: Array
    fp8: bool = True

    @classmethod
    def of(cls, shapes: Sequence[Shape], fp8: bool = True) -> Columns:
        fields = [(s.rows, s.hidden, s.intermediate, s.experts, s.tokens) for s in shapes]
        rows, hidden, intermediate, experts, tokens = (
            np.array(fields, dtype=np.float64).reshape(-1, 5).T
        )
        return cls(rows, hidden, intermediate, experts, tokens, fp8)

    @property
    def weights(self) -> Array:
        return self.experts * self.hidden * self.intermediate

    @cached_property
    def padded_rows(self) -> Array:
        """Rows in whole tiles, summed over experts: the mean over tokens that pick their experts
        uniformly.
        """
        # A token goes to a given expert with probability K / E, independently of other tokens. Rows
        # of an expert are then binomial; mean and spread are those of that distribution.
        share = self.rows / self.tokens / self.experts
        means = self.tokens * share
        spreads = np.sqrt(means * np.clip(1 - share, 0, 1))
        tiles = [_mean_tiles(mean, spread) for mean, spread in zip(means, spreads, strict=True)]
        return TILE_ROWS * self.experts * np.array(tiles)

    @cached_property
    def roofline_us(self) -> Array:
        """Sum of the stages' floors, with padded rows where kernels write them."""
        traffic = stage_bytes(self, self.fp8, self.padded_rows)
        floors = [
            np.maximum(self._waves_us(stage), 1e6 * traffic[stage] / COPY_BYTES_PER_S)
            for stage in (*FORWARD_STAGES, *BACKWARD_STAGES)
            if stage != "routing"
        ]
        return np.sum(floors, axis=0)

    def _waves_us(self, stage: str) -> Array | float:
        """Operations of a stage's tiles, the last wave counted as if it were full; 0 for a stage
        without a GEMM.
        """
        h, i, blocks = self.hidden, self.intermediate, self.padded_rows / TILE_ROWS
        wide = {"up": (2 * i, h), "down": (h, i), "dgated": (i, h), "dx_gemm": (h, 2 * i)}
        if stage in wide:
            columns, depth = wide[stage]
            tiles = blocks * np.ceil(columns / TILE_COLUMNS)
        elif stage in ("dw2", "dw1"):
            height, width = (h, i) if stage == "dw2" else (2 * i, h)
            tiles = self.experts * np.ceil(height / TILE_ROWS) * np.ceil(width / TILE_COLUMNS)
            # A weight gradient has as many tiles as the weights and contracts over the rows of an
            # expert.
            depth = self.padded_rows / self.experts
        else:
            return 0.0
        # A wave is one tile on each multiprocessor. A last wave that is half empty takes as long as
        # a full one.
        full = np.ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS
        flop = full * 2 * TILE_ROWS * TILE_COLUMNS * depth
        return np.asarray(flop / gemm_tflops(stage, self.fp8) / 1e6)


def _mean_tiles(mean: float, spread: float) -> float:
    """Mean of `ceil(rows / 128)` for normally distributed rows."""
    if spread < 1e-9:
        return math.ceil(mean / TILE_ROWS)
    # E[ceil(X)] is the sum over n of P(X > n): below `first` the probability is 1 and beyond `last`
    # it is 0. The 0.5 is the continuity correction of a normal distribution that stands for whole
    # numbers.
    first = max(0, math.floor((mean - TAIL * spread) / TILE_ROWS))
    last = math.ceil((mean + TAIL * spread) / TILE_ROWS)
    beyond = (
        (mean - TILE_ROWS * tile - 0.5) / spread / math.sqrt(2) for tile in range(first, last + 1)
    )
    return first + sum(0.5 * (1 + math.erf(z)) for z in beyond)


Term = Callable[[Columns, float], Array]
BASE_TERMS: dict[str, Term] = {
    "TK*H*I": lambda c, knee: c.rows * c.hidden * c.intermediate,
    "TK*max(H,2I)*ln(1+TK/TK0)": lambda c, knee: (
        c.rows * np.maximum(c.hidden, 2 * c.intermediate) * np.log1p(c.rows / knee)
    ),
    "E": lambda c, knee: c.experts,
}
EXTRA_TERMS: dict[str, Term] = {
    "1": lambda c, knee: np.ones_like(c.rows),
    "E*H*I": lambda c, knee: c.weights,
    "idle rows*H*I": lambda c, knee: (c.padded_rows - c.rows) * c.hidden * c.intermediate,
    "TK*H": lambda c, knee: c.rows * c.hidden,
    "TK*I": lambda c, knee: c.rows * c.intermediate,
    "TK": lambda c, knee: c.rows,
    "roofline": lambda c, knee: c.roofline_us,
}
TERMS = BASE_TERMS | EXTRA_TERMS


def evaluate(columns: Columns, names: Sequence[str], knee: float) -> Array:
    """Values of the terms, `[N, len(names)]`."""
    return np.stack([TERMS[name](columns, knee) for name in names], axis=1)
