"""The picture of a cost model: measured and predicted MFU over T*K, drawn off screen with matplotlib,
which is optional. Imports no framework.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SonicMoEError, writing
from .cost_model import CostModel
from .floors import PEAK_TFLOPS
from .points import Point

RESOLUTION = 48  # points of a predicted curve
DPI = 130


class PlotsUnavailableError(SonicMoEError, ImportError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise PlotsUnavailableError, with the remedy, unless matplotlib can be imported."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        raise PlotsUnavailableError(
            "no plots were drawn: matplotlib is not installed (pip install 'sonicmoe[plots]')"
        ) from None


def plot_model(model: CostModel, points: Sequence[Point], directory: Path) -> Path:
    """One panel per (H, I), a colour per E: dots measured (hollow: held out), lines predicted.
    PlotsUnavailableError without matplotlib.
    """
    peak = PEAK_TFLOPS["fp8" if model.fp8 else "bf16"]
    lines = defaultdict(list)
    for point in sorted(points, key=lambda point: point.shape):
        lines[(point.shape.hidden, point.shape.intermediate), point.shape.experts].append(point)
    widths, experts = (sorted(set(part)) for part in zip(*lines, strict=True))
    rows, columns = -(-len(widths) // 2), min(2, len(widths))
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A bare figure leaves pyplot's global state and the user's backend alone.
    figure = Figure(figsize=(6.5 * columns, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    # `squeeze=False` gives an array also for a single panel.
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    # An odd number of widths leaves a panel of the grid without points.
    for axis in axes[len(widths) :]:
        axis.set_visible(False)
    for (width, count), line in lines.items():
        _draw_line(axes[widths.index(width)], model, line, f"C{experts.index(count) % 10}", peak)
    for axis, (hidden, intermediate) in zip(axes, widths, strict=False):
        axis.set_title(f"H={hidden} I={intermediate}")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("T * K")
        axis.set_ylabel(f"MFU, % of {peak:.0f} TFLOPS")
        axis.grid(alpha=0.3)
        axis.legend()
    group = points[0].group
    figure.suptitle(
        f"{group}: dots measured (hollow: held out), lines predicted, {model.held_out_error:.2f} % off"
    )
    path = directory / f"mfu_curves_{re.sub(r'[^a-zA-Z0-9_]+', '_', group)}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=DPI)
    return path


def _draw_line(
    axis: Any, model: CostModel, points: Sequence[Point], colour: str, peak: float
) -> None:
    """Points that differ in T alone, and the prediction between them."""
    for held_out in (False, True):
        shown = [point for point in points if (point.shape in model.held_out) == held_out]
        axis.plot(
            [point.shape.rows for point in shown],
            [100 * point.shape.flop / (point.us or np.nan) / 1e6 / peak for point in shown],
            "o",
            color=colour,
            markerfacecolor="none" if held_out else colour,
        )
    # At equal ratios, because the axis is logarithmic.
    first, last = points[0].shape, points[-1].shape
    steps = np.unique(np.geomspace(first.tokens, last.tokens, RESOLUTION).round())
    curve = [replace(first, tokens=int(tokens)) for tokens in steps]
    label = f"E={first.experts}"
    axis.plot([shape.rows for shape in curve], 100 * model.mfu(curve), color=colour, label=label)
