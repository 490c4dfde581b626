"""A fitted cost model as tables: its terms, and where it errs. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.table import Table

from .cost_model import CostModel, mape
from .shapes import Shape
from .sweep import Point

GROUPS: dict[str, Callable[[Shape], str]] = {
    "T": lambda shape: str(shape.tokens),
    "E": lambda shape: str(shape.experts),
    "H, I": lambda shape: f"{shape.hidden}, {shape.intermediate}",
}


def term_table(model: CostModel, points: Sequence[Point]) -> Table:
    """Every term with its coefficient, and its share of the predicted time over all points."""
    shares = model.shares([point.shape for point in points])
    table = Table("term", "us per unit", "mean share of the time")
    for name, value in model.coefficients.items():
        shown = name.replace("TK0", f"{model.knee:.0f}")
        table.add_row(shown, f"{value:.4g}", f"{shares[name]:.1%}")
    return table


def residual_table(model: CostModel, points: Sequence[Point]) -> Table:
    """Mean and mean absolute error of time per T, per E and per (H, I), and on held-out points. A
    mean that is not zero is a trend that the form does not explain.
    """
    errors = model.errors(points)
    held_out = np.array([point.shape in model.held_out for point in points])
    table = Table(
        "points",
        "number",
        "mean error %",
        "mean absolute error %",
        "worst %",
        "mean spread of a point %",
    )
    _add_row(table, "fitted", points, errors, ~held_out)
    _add_row(table, "held out", points, errors, held_out)
    for group, key in GROUPS.items():
        keys = [key(point.shape) for point in points]
        for value in dict.fromkeys(
            sorted(keys, key=lambda text: [int(part) for part in text.split(",")])
        ):
            _add_row(
                table,
                f"{group} = {value}",
                points,
                errors,
                np.array([one == value for one in keys]),
            )
    return table


def _add_row(
    table: Table, name: str, points: Sequence[Point], errors: np.ndarray, chosen: np.ndarray
) -> None:
    spreads = [
        p.percent
        for p, inside in zip(points, chosen, strict=True)
        if inside and p.percent is not None
    ]
    spread = f"{np.mean(spreads):.2f}" if spreads else "–"
    # A group without points gets no row.
    own = errors[chosen]
    if own.size:
        worst = own[np.abs(own).argmax()]
        table.add_row(
            name,
            str(own.size),
            f"{100 * own.mean():+.2f}",
            f"{mape(own):.2f}",
            f"{100 * worst:+.1f}",
            spread,
        )
