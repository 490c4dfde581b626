"""Pictures of a cost model: measured and predicted MFU over T*K, and contours of predicted MFU over
(T*K, E). Imports no framework.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..plotting import new_figure, save_figure
from .cost_model import CostModel, groups
from .floors import PEAK_TFLOPS
from .shapes import Shape
from .sweep import Point

RESOLUTION = 48


def plot_model(model: CostModel, points: Sequence[Point], directory: Path) -> list[Path]:
    """Both pictures of one engine; returns the files written.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
    """
    name = re.sub(r"\W+", "_", points[0].group)
    return [
        plot_curves(model, points, directory / f"mfu_curves_{name}.png"),
        plot_contours(model, points, directory / f"mfu_contours_{name}.png"),
    ]


def plot_curves(model: CostModel, points: Sequence[Point], path: Path) -> Path:
    """One panel per (H, I), a colour per E: dots measured (hollow: held out), lines predicted."""
    widths = sorted({(p.hidden, p.intermediate) for p in points})
    colours = {
        experts: f"C{number % 10}"
        for number, experts in enumerate(sorted({p.experts for p in points}))
    }
    rows, columns = -(-len(widths) // 2), min(2, len(widths))
    figure = new_figure((6.5 * columns, 4 * rows))
    # `squeeze=False` gives an array also for a single panel.
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(widths) :]:
        axis.set_visible(False)
    peak = PEAK_TFLOPS["fp8" if model.fp8 else "bf16"]
    for axis, (hidden, intermediate) in zip(axes, widths, strict=False):
        own = [p for p in points if (p.hidden, p.intermediate) == (hidden, intermediate)]
        for (_, _, experts), line in groups(own):
            colour = colours[experts]
            for held_out in (False, True):
                shown = [p for p in line if (p.shape in model.held_out) == held_out]
                axis.plot(
                    [p.shape.rows for p in shown],
                    [100 * p.shape.flop / (p.us or np.nan) / 1e6 / peak for p in shown],
                    "o", color=colour, markerfacecolor="none" if held_out else colour,
                )  # fmt: skip
            curve = _along_tokens(line[0].shape, line[-1].tokens)
            axis.plot(
                [s.rows for s in curve], 100 * model.mfu(curve), color=colour, label=f"E={experts}"
            )
        axis.set_title(f"H={hidden} I={intermediate}")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("T * K")
        axis.set_ylabel(f"MFU, % of {peak:.0f} TFLOPS")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(
        f"{points[0].group}: dots measured (hollow: held out), lines predicted, {model.held_out_mape:.2f} % off"
    )
    return save_figure(figure, path)


def _along_tokens(shape: Shape, last: int) -> list[Shape]:
    tokens = np.unique(np.geomspace(shape.tokens, last, RESOLUTION).round().astype(int))
    return [Shape(**{**vars(shape), "tokens": int(t)}) for t in tokens]


def plot_contours(model: CostModel, points: Sequence[Point], path: Path) -> Path:
    """Predicted MFU over (log T*K, E) for the widest (H, I) measured; crosses mark measured points."""
    widest = max(points, key=lambda p: p.hidden * p.intermediate)
    own = [p for p in points if (p.hidden, p.intermediate) == (widest.hidden, widest.intermediate)]
    tokens = np.unique(
        np.geomspace(min(p.tokens for p in own), max(p.tokens for p in own), RESOLUTION)
        .round()
        .astype(int)
    )
    # A token cannot pick more experts than there are.
    least = max(min(p.experts for p in own), widest.topk)
    experts = np.unique(
        np.geomspace(least, max(2 * least, *(p.experts for p in own)), RESOLUTION)
        .round()
        .astype(int)
    )
    shapes = [
        Shape(int(t), widest.hidden, widest.intermediate, int(e), widest.topk)
        for e in experts
        for t in tokens
    ]
    values = 100 * model.mfu(shapes).reshape(len(experts), len(tokens))
    figure = new_figure((7, 5))
    axes = figure.subplots()
    lines = axes.contourf(tokens * widest.topk, experts, values, levels=16, cmap="viridis")
    axes.plot([p.shape.rows for p in own], [p.experts for p in own], "kx")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("T * K")
    axes.set_ylabel("E")
    axes.set_title(
        f"{points[0].group}: predicted MFU in %, H={widest.hidden} I={widest.intermediate}"
    )
    figure.colorbar(lines, ax=axes)
    return save_figure(figure, path)
