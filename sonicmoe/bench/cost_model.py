"""Time of one forward and backward as a function of T, K, H, I, E, fitted to a sweep. numpy only.

The least form is

    us = a * TK*H*I + b * TK*max(H, 2I) * ln(1 + TK/TK0) + c * E           compute + cache misses + per expert

and the fit adds, one by one, terms that lower the error it would make on points it has not seen (cross-validation over the
training points), until none does. Coefficients are costs: none may be negative. Errors are relative, so small shapes count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SonicMoEError
from .floors import PEAK_TFLOPS
from .shapes import Shape
from .sweep import Point

Array = np.ndarray
TILE_ROWS = 128
HELD_OUT_SHARE = 0.2
FOLDS = 5
LEAST_POINTS = 12
LEAST_GAIN = 0.03  # of the cross-validated error, for a term to be kept
KNEES = tuple(2.0**k for k in range(8, 22))


class FitError(SonicMoEError, ValueError):
    """Too few points for a fit."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Sizes of N points as fp64 `[N]` arrays."""

    tk: Array
    hidden: Array
    intermediate: Array
    experts: Array
    tokens: Array

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> Columns:
        """From shapes."""
        fields = [(s.rows, s.hidden, s.intermediate, s.experts, s.tokens) for s in shapes]
        return cls(*np.array(fields, dtype=np.float64).reshape(-1, 5).T)

    @property
    def idle_rows(self) -> Array:
        """Rows of tiles that compute nothing: half a tile per expert on average, more where an expert has less than half a tile."""
        return np.maximum(self.experts * TILE_ROWS / 2, self.experts * TILE_ROWS - self.tk)

    @property
    def weights(self) -> Array:
        """E*H*I."""
        return self.experts * self.hidden * self.intermediate


Term = Callable[[Columns, float], Array]
BASE_TERMS: dict[str, Term] = {
    "TK*H*I": lambda c, knee: c.tk * c.hidden * c.intermediate,
    "TK*max(H,2I)*ln(1+TK/TK0)": lambda c, knee: (
        c.tk * np.maximum(c.hidden, 2 * c.intermediate) * np.log1p(c.tk / knee)
    ),
    "E": lambda c, knee: c.experts,
}
EXTRA_TERMS: dict[str, Term] = {
    "1": lambda c, knee: np.ones_like(c.tk),
    "E*H*I": lambda c, knee: c.weights,
    "idle rows*H*I": lambda c, knee: c.idle_rows * c.hidden * c.intermediate,
    "TK*H": lambda c, knee: c.tk * c.hidden,
    "TK*I": lambda c, knee: c.tk * c.intermediate,
    "TK": lambda c, knee: c.tk,
}
TERMS = BASE_TERMS | EXTRA_TERMS


@dataclass(frozen=True, eq=False)
class CostModel:
    """A fit: `us = sum(coefficient * term)`. Errors in percent, of time and of MFU in points; held-out points were never seen.

    base_mape: held-out error of the least form alone.
    """

    coefficients: dict[str, float]
    knee: float
    fp8: bool
    points: int
    train_mape: float
    held_out_mape: float
    held_out_worst: float
    base_mape: float
    mfu_error: float
    held_out: tuple[Shape, ...]

    def predict(self, shapes: Sequence[Shape]) -> Array:
        """Microseconds of forward and backward."""
        return evaluate(Columns.of(shapes), tuple(self.coefficients), self.knee) @ np.array(
            list(self.coefficients.values())
        )

    def mfu(self, shapes: Sequence[Shape]) -> Array:
        """Predicted share of the peak of the operands' format."""
        flop = np.array([shape.flop for shape in shapes])
        return flop / self.predict(shapes) / 1e6 / PEAK_TFLOPS["fp8" if self.fp8 else "bf16"]

    def lines(self) -> list[str]:
        """The report."""
        terms = " + ".join(f"{value:.4g} * {name}" for name, value in self.coefficients.items())
        return [
            f"us = {terms}   with TK0 = {self.knee:.0f}",
            f"error of time: {self.train_mape:.2f} % on {self.points - len(self.held_out)} points of the fit, "
            f"{self.held_out_mape:.2f} % on {len(self.held_out)} held-out points (worst {self.held_out_worst:.1f} %)",
            f"error of MFU on held-out points: {self.mfu_error:.2f} percentage points; "
            f"the least form alone: {self.base_mape:.2f} % of time",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {name: value for name, value in vars(self).items() if name != "held_out"}
        return {**plain, "held_out": [vars(shape) for shape in self.held_out]}


def evaluate(columns: Columns, names: Sequence[str], knee: float) -> Array:
    """Values of the terms, `[N, len(names)]`."""
    return np.stack([TERMS[name](columns, knee) for name in names], axis=1)


@dataclass(frozen=True, eq=False)
class _Data:
    """Points as arrays: what a fit sees, or what it is scored on."""

    columns: Columns
    us: Array
    mfu: Array

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Data:
        shapes, us = [point.shape for point in points], np.array([point.us for point in points], dtype=np.float64)
        peak = PEAK_TFLOPS["fp8" if points[0].fp8 else "bf16"]
        return cls(Columns.of(shapes), us, 100 * np.array([shape.flop for shape in shapes]) / us / 1e6 / peak)

    def fit(self, names: Sequence[str], knee: float) -> Array:
        return solve(evaluate(self.columns, names, knee), self.us)

    def errors(self, names: Sequence[str], knee: float, weights: Array) -> Array:
        """Relative, of predicted time."""
        return np.asarray(evaluate(self.columns, names, knee) @ weights / self.us - 1)


def fit_model(points: Sequence[Point], seed: int = 0) -> CostModel:
    """Fit one engine's points; a fifth of them, drawn by `seed`, is held out and only scored.

    Raises:
        FitError: fewer than `LEAST_POINTS` points.
    """
    if len(points) < LEAST_POINTS:
        raise FitError(f"{len(points)} points; a fit needs at least {LEAST_POINTS}: continue the sweep")
    held_out = set(np.random.default_rng(seed).permutation(len(points))[: max(1, round(HELD_OUT_SHARE * len(points)))])
    unseen = [point for number, point in enumerate(points) if number in held_out]
    seen, test = _Data.of([point for number, point in enumerate(points) if number not in held_out]), _Data.of(unseen)
    names, knee = choose_terms(seen.columns, seen.us)
    weights = seen.fit(names, knee)
    base = tuple(BASE_TERMS)
    _, base_knee = best_knee(seen.columns, seen.us, base)
    errors = test.errors(names, knee, weights)
    return CostModel(
        coefficients={name: float(value) for name, value in zip(names, weights, strict=True) if value > 0},
        knee=knee,
        fp8=points[0].fp8,
        points=len(points),
        train_mape=mape(seen.errors(names, knee, weights)),
        held_out_mape=mape(errors),
        held_out_worst=100 * float(np.abs(errors).max()),
        base_mape=mape(test.errors(base, base_knee, seen.fit(base, base_knee))),
        mfu_error=float(np.mean(np.abs(test.mfu / (1 + errors) - test.mfu))),
        held_out=tuple(point.shape for point in unseen),
    )


def mape(relative_errors: Array) -> float:
    """Mean absolute error in percent."""
    return 100 * float(np.mean(np.abs(relative_errors)))


def choose_terms(columns: Columns, times: Array) -> tuple[tuple[str, ...], float]:
    """Greedy: the least form, then whatever extra term lowers the cross-validated error most, until none does by `LEAST_GAIN`."""
    names = tuple(BASE_TERMS)
    error, knee = best_knee(columns, times, names)
    while True:
        trials = [(*best_knee(columns, times, (*names, extra)), extra) for extra in EXTRA_TERMS if extra not in names]
        if not trials:
            return names, knee
        trial_error, trial_knee, extra = min(trials)
        if trial_error > (1 - LEAST_GAIN) * error:
            return names, knee
        names, error, knee = (*names, extra), trial_error, trial_knee


def best_knee(columns: Columns, times: Array, names: Sequence[str]) -> tuple[float, float]:
    """`(cross-validated MAPE, TK0)` over the grid of knees."""
    return min((cross_validated(columns, times, names, knee), knee) for knee in KNEES)


def cross_validated(columns: Columns, times: Array, names: Sequence[str], knee: float) -> float:
    """MAPE over `FOLDS` folds, each predicted by a fit to the others."""
    values = evaluate(columns, names, knee)
    fold = np.arange(len(times)) % FOLDS
    errors = np.empty(len(times))
    for number in range(FOLDS):
        inside = fold != number
        errors[~inside] = values[~inside] @ solve(values[inside], times[inside]) / times[~inside] - 1
    return mape(errors)


def solve(values: Array, times: Array) -> Array:
    """Non-negative coefficients of least relative squares: terms that come out negative are dropped, the worst first."""
    scaled = values / times[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    kept = list(range(values.shape[1]))
    weights = np.zeros(values.shape[1])
    for _ in range(values.shape[1]):
        found = np.linalg.lstsq(scaled[:, kept] / norms[kept], np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            weights[kept] = found / norms[kept]
            return weights
        kept.pop(int(found.argmin()))
    return weights


def groups(points: Sequence[Point]) -> Iterator[tuple[tuple[int, int, int], list[Point]]]:
    """Points that differ in T alone, sorted by T."""
    keys = dict.fromkeys((p.hidden, p.intermediate, p.experts) for p in points)
    for key in keys:
        own = [p for p in points if (p.hidden, p.intermediate, p.experts) == key]
        yield key, sorted(own, key=lambda p: p.tokens)
