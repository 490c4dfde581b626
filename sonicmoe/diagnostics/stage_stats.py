"""Statistics of one stage tensor: counts, extremes, the use of its codes, and its distance from the
expected values. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .step_dump import Array

CHUNK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class StageValue:
    """One stage tensor on the host: values `[..., C]`, and for a block-scaled tensor its codes (as
    fp32) and the largest code.
    """

    values: Array
    codes: Array | None = None
    largest_code: float = 0.0

    def head(self, rows: int) -> StageValue:
        codes = None if self.codes is None else self.codes[:rows]
        return StageValue(self.values[:rows], codes, self.largest_code)


@dataclass(frozen=True)
class StageStats:
    """Counts and extremes of the elements that count (`mask` of `stage_stats`).

    first_bad: index of the first element that is not finite. low, high: extremes of the finite
    ones, NaN when there are none.
    saturation: share of codes at the largest magnitude. A block's own maximum lies there by
    construction, so FP32 scales give
        at least one per block. underflow: share of elements that are not zero in the golden and
            zero in codes.
    cosine, rmse: against the expected values, rmse relative to their norm; NaN where not
    comparable.
    """

    total: int
    finite: int
    nan: int
    inf: int
    first_bad: tuple[int, ...] | None
    low: float
    high: float
    saturation: float | None = None
    underflow: float | None = None
    cosine: float = float("nan")
    rmse: float = float("nan")


def stage_stats(value: StageValue, wanted: Array | None, mask: Array | None = None) -> StageStats:
    """Describe a stage. `mask [R]` leaves out rows that nobody reads; `wanted` has the shape of the
    values.
    """
    rows = np.ones(len(value.values), dtype=bool) if mask is None else mask
    values = value.values[rows]
    bad = ~np.isfinite(values)
    nan = int(np.isnan(values).sum())
    good = values[~bad]
    return StageStats(
        total=values.size,
        finite=int(good.size),
        nan=nan,
        inf=int(bad.sum()) - nan,
        first_bad=first_index(bad, rows),
        low=float(good.min()) if good.size else float("nan"),
        high=float(good.max()) if good.size else float("nan"),
        **_code_use(value, wanted, rows),
        **({} if wanted is None else closeness(values, wanted[rows])),
    )


def first_index(bad: Array, rows: Array) -> tuple[int, ...] | None:
    """Index in the whole tensor of the first True of `bad`, which holds the selected rows only."""
    if not bad.any():
        return None
    # `bad` has the selected rows alone, so the row number is translated back; the other axes are as
    # they are.
    position = np.unravel_index(int(bad.argmax()), bad.shape)
    return (int(np.flatnonzero(rows)[position[0]]), *(int(axis) for axis in position[1:]))


def closeness(values: Array, wanted: Array) -> dict[str, Any]:
    """Cosine and relative RMSE over all elements; both NaN when an element is not finite."""
    a, b = values.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        # Two zero vectors count as equal in direction, a zero vector beside another as orthogonal.
        norm_a, norm_b = float(np.sqrt(a @ a)), float(np.sqrt(b @ b))
        cosine = float(a @ b) / (norm_a * norm_b) if norm_a and norm_b else float(norm_a == norm_b)
        difference = float(np.linalg.norm(a - b))
        rmse = difference / norm_b if norm_b else (0.0 if difference == 0 else float("inf"))
    return {"cosine": cosine, "rmse": rmse}


def _code_use(value: StageValue, wanted: Array | None, rows: Array) -> dict[str, Any]:
    if value.codes is None:
        return {}
    codes = value.codes[rows]
    # A block's amax lies on the largest code by construction, so a share is told and not a count.
    used: dict[str, Any] = {
        "saturation": float((np.abs(codes) >= value.largest_code).mean()) if codes.size else 0.0
    }
    if wanted is not None:
        live = wanted[rows] != 0
        # Of the elements that should not be zero, because zeros are exact in every format.
        used["underflow"] = float((codes[live] == 0).mean()) if live.any() else 0.0
    return used


def row_deviations(values: Array, wanted: Array, floor: float) -> Array:
    """Per row (all leading axes) `||a - g|| / max(||g||, floor * rms of all row norms)`; NaN where
    a value is not finite.
    """
    a, g = (array.reshape(-1, array.shape[-1]) for array in (values, wanted))
    # In chunks, so that fp64 copies exist of some rows at a time and not of the whole stage.
    errors, norms = np.empty(len(a)), np.empty(len(a))
    with np.errstate(all="ignore"):
        for start in range(0, len(a), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            expected = g[part].astype(np.float64)
            errors[part] = np.linalg.norm(a[part] - expected, axis=1)
            norms[part] = np.linalg.norm(expected, axis=1)
        typical = float(np.sqrt(np.mean(norms**2))) if len(norms) else 0.0
        # A row of nearly zeros would be far off by any rounding; the floor measures it against
        # typical rows.
        scale = np.maximum(norms, floor * typical)
        return np.where(
            scale > 0, errors / np.where(scale > 0, scale, 1), np.where(errors > 0, np.inf, errors)
        )
