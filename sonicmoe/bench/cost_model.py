"""Time of one forward and backward as a function of T, K, H, I, E, fitted to a sweep. numpy only.

The time is a sum of terms (`TERMS`), each a function of the sizes times a coefficient. Coefficients
are costs, so none may be negative; a term that would get a negative one is left out. Errors are
relative, so small shapes count. Which points are held out depends on their sizes alone: a sweep that
is continued never moves one into the fit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .floors import OTHER_STAGES, PEAK_TFLOPS, floors
from .points import Point, SweepError
from .shapes import Shape

Array = np.ndarray
HELD_OUT_SHARE = 0.2
LEAST_POINTS = 12
TILE_ROWS = 128


def roofline(shape: Shape, fp8: bool, card: str) -> float:
    """Microseconds of the stages of forward and backward, each as fast as its floor."""
    least = floors(shape, fp8, card)
    return sum(us for stage, us in least.items() if stage not in OTHER_STAGES)


def idle_rows(shape: Shape) -> float:
    """Rows of tiles that hold no token, which kernels compute all the same."""
    rows = shape.rows / shape.experts
    if shape.topk == shape.experts:  # every token goes to every expert
        return shape.experts * (math.ceil(rows / TILE_ROWS) * TILE_ROWS - rows)
    # Routing decides how full an expert's last tile is: half, in the mean over random tokens.
    return shape.experts * TILE_ROWS / 2


TERMS: dict[str, Callable[[Shape, bool, str], float]] = {
    "roofline": roofline,
    "TK*H*I": lambda s, *_: s.rows * s.hidden * s.intermediate,
    "idle rows*H*I": lambda s, *_: idle_rows(s) * s.hidden * s.intermediate,
    "E*H*I": lambda s, *_: s.experts * s.hidden * s.intermediate,
    "TK*H": lambda s, *_: s.rows * s.hidden,
    "TK*I": lambda s, *_: s.rows * s.intermediate,
    "TK": lambda s, *_: s.rows,
    "E": lambda s, *_: s.experts,
    "1": lambda s, *_: 1.0,
}


@dataclass(frozen=True, eq=False)
class CostModel:
    """A fit: `us = sum(coefficient * term)`.

    Errors are of points that the fit never saw, but for `fitted_error`: mean absolute ones of time
    in percent, `worst` the largest of them, and `mfu_error` the mean of MFU in percentage points.
    """

    coefficients: dict[str, float]
    fp8: bool
    card: str
    points: int
    fitted_error: float
    held_out_error: float
    worst: float
    mfu_error: float
    held_out: tuple[Shape, ...]

    def predict(self, shapes: Sequence[Shape]) -> Array:
        """Microseconds of forward and backward, `[N]`."""
        return self._parts(shapes).sum(1)

    def mfu(self, shapes: Sequence[Shape]) -> Array:
        """Predicted share of the peak of the operands' format, `[N]`."""
        return _mfu(shapes, self.predict(shapes), self.fp8)

    def shares(self, shapes: Sequence[Shape]) -> dict[str, float]:
        """Mean share of the predicted time, by term."""
        parts = self._parts(shapes)
        means = (parts / parts.sum(1, keepdims=True)).mean(0).tolist()
        return dict(zip(self.coefficients, means, strict=True))

    def _parts(self, shapes: Sequence[Shape]) -> Array:
        """Microseconds of each term, `[N, terms]`."""
        values = evaluate(shapes, self.fp8, self.card, self.coefficients)
        return values * np.array(list(self.coefficients.values()))

    def prediction_lines(self, shapes: Sequence[Shape], points: Sequence[Point]) -> list[str]:
        """Time and MFU of each shape, and which of its sizes are beyond those of the sweep."""
        swept = list(zip(*(vars(point.shape).values() for point in points), strict=True))
        lines = []
        for shape, us, mfu in zip(shapes, self.predict(shapes), self.mfu(shapes), strict=True):
            sizes = zip("THIEK", vars(shape).values(), swept, strict=True)
            beyond = [letter for letter, size, all_ in sizes if not min(all_) <= size <= max(all_)]
            told = f"; beyond the sweep in {', '.join(beyond)}" if beyond else ""
            lines.append(f"predicted at {shape}: {us:,.0f} us, MFU {mfu:.1%}{told}")
        return lines

    def error_lines(self) -> list[str]:
        unseen = len(self.held_out)
        return [
            f"error of time: {self.held_out_error:.2f} % on {unseen} held-out points (worst "
            f"{self.worst:.1f} %), {self.fitted_error:.2f} % on {self.points - unseen} points of "
            f"the fit",
            f"error of MFU on held-out points: {self.mfu_error:.2f} percentage points",
        ]


def fit_model(points: Sequence[Point], seed: int = 0) -> CostModel:
    """Fit one engine's points; about a fifth of them, drawn by a hash of `seed` and their sizes, is
    held out and only scored. SweepError for fewer than `LEAST_POINTS` points.
    """
    if len(points) < LEAST_POINTS:
        raise SweepError(
            f"{len(points)} points; a fit needs at least {LEAST_POINTS}: continue the sweep"
        )
    # The order of the file must not decide which points are held out.
    points = sorted(points, key=lambda point: draw(point.shape, seed))
    count = max(1, sum(draw(point.shape, seed) < HELD_OUT_SHARE for point in points))
    unseen, rest = points[:count], points[count:]
    fp8, card = points[0].fp8, points[0].device
    weights = solve(evaluate([point.shape for point in rest], fp8, card, TERMS), _times(rest))
    fitted, errors = (_errors(some, weights) for some in (rest, unseen))
    shapes = [point.shape for point in unseen]
    mfu = 100 * _mfu(shapes, _times(unseen), fp8)
    return CostModel(
        # `solve` leaves a zero for a term that it dropped; such a term is no part of the model.
        coefficients={
            name: float(value) for name, value in zip(TERMS, weights, strict=True) if value > 0
        },
        fp8=fp8,
        card=card,
        points=len(points),
        fitted_error=100 * float(np.abs(fitted).mean()),
        held_out_error=100 * float(np.abs(errors).mean()),
        worst=100 * float(np.abs(errors).max()),
        # Time that is predicted by a factor (1 + error) too long means an MFU smaller by that
        # factor.
        mfu_error=float(np.abs(mfu / (1 + errors) - mfu).mean()),
        held_out=tuple(shapes),
    )


def evaluate(shapes: Sequence[Shape], fp8: bool, card: str, names: Iterable[str]) -> Array:
    """Values of the terms, `[len(shapes), len(names)]`."""
    terms = [TERMS[name] for name in names]
    rows = [[float(term(shape, fp8, card)) for term in terms] for shape in shapes]
    return np.array(rows).reshape(len(rows), len(terms))


def _times(points: Sequence[Point]) -> Array:
    return np.array([point.us for point in points], dtype=np.float64)


def _errors(points: Sequence[Point], weights: Array) -> Array:
    """Relative errors of predicted time, `[N]`; positive where it is too long."""
    one = points[0]
    values = evaluate([point.shape for point in points], one.fp8, one.device, TERMS)
    return np.asarray(values @ weights / _times(points) - 1)


def _mfu(shapes: Sequence[Shape], us: Array, fp8: bool) -> Array:
    flop = np.array([shape.flop for shape in shapes])
    return flop / us / 1e6 / PEAK_TFLOPS["fp8" if fp8 else "bf16"]


def draw(shape: Shape, seed: int) -> float:
    """A number in [0, 1) that looks random and is the same for the same sizes and seed."""
    # A hash and not a random generator: the number of one shape must not depend on which other
    # shapes the sweep holds. 6 bytes are 48 bits, hence the divisor.
    digest = hashlib.sha256(f"{seed}: {shape}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


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
