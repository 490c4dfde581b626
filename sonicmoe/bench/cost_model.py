"""Time of one forward and backward as a function of T, K, H, I, E, fitted to a sweep. numpy only.

The least form is

    us = a * TK*H*I + b * TK*max(H, 2I) * ln(1 + TK/TK0) + c * E           compute + cache misses + per expert

and the fit adds, one by one, terms of `cost_terms.py` that lower the error it would make on points
it has not seen (cross-validation over the training points), until none does. Coefficients are
costs: none may be negative. Errors are relative, so small shapes count. Which points are held out
depends on their sizes alone: a sweep that is continued never moves one into the fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SonicMoEError
from .cost_terms import BASE_TERMS, EXTRA_TERMS, Columns, evaluate
from .floors import PEAK_TFLOPS
from .points import Point
from .shapes import Shape

Array = np.ndarray
HELD_OUT_SHARE = 0.2
FOLDS = 5
LEAST_POINTS = 12
LEAST_GAIN = 0.03  # of the cross-validated error, for a term to be kept
# TK0 stands inside a logarithm, so it cannot be found by a linear fit. Each candidate of this grid
# is fitted, and the best one is kept.
KNEES = tuple(2.0**k for k in range(8, 22))


class FitError(SonicMoEError, ValueError):
    """Too few points for a fit."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """A fit: `us = sum(coefficient * term)`. Errors in percent, of time and of MFU in points;
    held-out points were never seen.

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
        return self._parts(shapes).sum(1)

    def mfu(self, shapes: Sequence[Shape]) -> Array:
        """Predicted share of the peak of the operands' format."""
        return _mfu(shapes, self.predict(shapes), self.fp8)

    def shares(self, shapes: Sequence[Shape]) -> dict[str, float]:
        """Mean share of the predicted time, by term."""
        parts = self._parts(shapes)
        means = (parts / parts.sum(1, keepdims=True)).mean(0).tolist()
        return dict(zip(self.coefficients, means, strict=True))

    def errors(self, points: Sequence[Point]) -> Array:
        """Relative errors of the predicted time, `[N]`; positive where it is too long."""
        return self.predict([point.shape for point in points]) / _arrays(points)[1] - 1

    def _parts(self, shapes: Sequence[Shape]) -> Array:
        """Microseconds of each term, `[N, terms]`."""
        values = evaluate(Columns.of(shapes, self.fp8), tuple(self.coefficients), self.knee)
        return values * np.array(list(self.coefficients.values()))

    def lines(self) -> list[str]:
        terms = " + ".join(f"{value:.4g} * {name}" for name, value in self.coefficients.items())
        return [
            f"us = {terms}   with TK0 = {self.knee:.0f}",
            f"error of time: {self.train_mape:.2f} % on {self.points - len(self.held_out)} points of the fit, "
            f"{self.held_out_mape:.2f} % on {len(self.held_out)} held-out points (worst {self.held_out_worst:.1f} %)",
            f"error of MFU on held-out points: {self.mfu_error:.2f} percentage points; "
            f"the least form alone: {self.base_mape:.2f} % of time",
        ]

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "held_out"}
        return {**plain, "held_out": [vars(shape) for shape in self.held_out]}


def fit_model(points: Sequence[Point], seed: int = 0) -> CostModel:
    """Fit one engine's points; about a fifth of them, drawn by a hash of `seed` and their sizes, is
    held out and only scored.

    Raises:
        FitError: fewer than `LEAST_POINTS` points.
    """
    if len(points) < LEAST_POINTS:
        raise FitError(
            f"{len(points)} points; a fit needs at least {LEAST_POINTS}: continue the sweep"
        )
    # The order of the file must not decide which points are held out.
    points = sorted(points, key=lambda point: draw(point.shape, seed))
    count = max(1, sum(draw(point.shape, seed) < HELD_OUT_SHARE for point in points))
    unseen, rest = points[:count], points[count:]
    columns, times = _arrays(rest)
    names, knee = choose_terms(columns, times)
    weights = solve(evaluate(columns, names, knee), times)
    base = tuple(BASE_TERMS)
    _, base_knee = best_knee(columns, times, base)
    base_weights = solve(evaluate(columns, base, base_knee), times)
    errors = _errors(unseen, names, knee, weights)
    fp8 = points[0].fp8
    mfu = 100 * _mfu([point.shape for point in unseen], _arrays(unseen)[1], fp8)
    return CostModel(
        # `solve` leaves a zero for a term that it dropped; such a term is no part of the model.
        coefficients={
            name: float(value) for name, value in zip(names, weights, strict=True) if value > 0
        },
        knee=knee,
        fp8=fp8,
        points=len(points),
        train_mape=mape(_errors(rest, names, knee, weights)),
        held_out_mape=mape(errors),
        held_out_worst=100 * float(np.abs(errors).max()),
        base_mape=mape(_errors(unseen, base, base_knee, base_weights)),
        # Time that is predicted by a factor (1 + error) too long means an MFU smaller by that
        # factor.
        mfu_error=float(np.mean(np.abs(mfu / (1 + errors) - mfu))),
        held_out=tuple(point.shape for point in unseen),
    )


def _arrays(points: Sequence[Point]) -> tuple[Columns, Array]:
    """Sizes and microseconds."""
    columns = Columns.of([point.shape for point in points], points[0].fp8)
    return columns, np.array([point.us for point in points], dtype=np.float64)


def _errors(points: Sequence[Point], names: Sequence[str], knee: float, weights: Array) -> Array:
    """Relative, of predicted time."""
    columns, times = _arrays(points)
    return np.asarray(evaluate(columns, names, knee) @ weights / times - 1)


def _mfu(shapes: Sequence[Shape], us: Array, fp8: bool) -> Array:
    """Share of the peak of the operands' format."""
    flop = np.array([shape.flop for shape in shapes])
    return flop / us / 1e6 / PEAK_TFLOPS["fp8" if fp8 else "bf16"]


def draw(shape: Shape, seed: int) -> float:
    """A number in [0, 1) that looks random and is the same for the same sizes and seed."""
    # A hash and not a random generator: the number of one shape must not depend on which other
    # shapes the sweep holds. 6 bytes are 48 bits, hence the divisor.
    digest = hashlib.sha256(f"{seed}: {shape}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def mape(relative_errors: Array) -> float:
    """Mean absolute error in percent."""
    return 100 * float(np.mean(np.abs(relative_errors)))


def choose_terms(columns: Columns, times: Array) -> tuple[tuple[str, ...], float]:
    """Names of the chosen terms and TK0. A greedy search starts with the least form and adds the
    extra term that lowers the cross-validated error most, until none lowers it by `LEAST_GAIN`.
    """
    names = tuple(BASE_TERMS)
    error, knee = best_knee(columns, times, names)
    # A term always lowers the error on the points it is fitted to. It is kept only if it lowers the
    # error on points left out of the fit, and by a margin that noise does not reach.
    while True:
        trials = [
            (*best_knee(columns, times, (*names, extra)), extra)
            for extra in EXTRA_TERMS
            if extra not in names
        ]
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
    # The points come sorted by `draw`, which looks random, so every fifth of them is a random fold.
    fold = np.arange(len(times)) % FOLDS
    errors = np.empty(len(times))
    for number in range(FOLDS):
        inside = fold != number
        errors[~inside] = (
            values[~inside] @ solve(values[inside], times[inside]) / times[~inside] - 1
        )
    return mape(errors)


def solve(values: Array, times: Array) -> Array:
    """Non-negative coefficients of least relative squares: terms that come out negative are
    dropped, the worst first.
    """
    # Dividing each row by its time makes the residuals relative: a point of 200 us counts as much
    # as one of 20 ms. Columns differ by many orders of magnitude, so each is divided by its norm
    # too.
    scaled = values / times[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    kept = list(range(values.shape[1]))
    weights = np.zeros(values.shape[1])
    for _ in range(values.shape[1]):
        # The right-hand side is 1 everywhere, because the times were divided by themselves.
        found = np.linalg.lstsq(scaled[:, kept] / norms[kept], np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            weights[kept] = found / norms[kept]
            return weights
        # One at a time: dropping a term changes the coefficients of all others, and another
        # negative one may become positive.
        kept.pop(int(found.argmin()))
    return weights


def groups(points: Sequence[Point]) -> Iterator[tuple[tuple[int, int, int], list[Point]]]:
    """Points that differ in T alone, sorted by H, I, E and T."""
    keys = sorted({(p.hidden, p.intermediate, p.experts) for p in points})
    for key in keys:
        own = [p for p in points if (p.hidden, p.intermediate, p.experts) == key]
        yield key, sorted(own, key=lambda p: p.tokens)
