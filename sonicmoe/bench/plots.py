"""Pictures, drawn off screen. Of a benchmark: time per stage against its floor, and MFU over T*K.
Of a cost model: measured and predicted MFU over T*K, and contours of predicted MFU over (T*K, E).
Imports no framework.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plotting import new_figure, require_matplotlib, save_figure
from .cost_model import CostModel, groups
from .figures import Result
from .floors import PEAK_TFLOPS, PHASE_STAGES
from .points import Point
from .shapes import Shape

FLOOR_COLOURS = ("gainsboro", "darkgrey")  # BF16, FP8
RESOLUTION = 48  # points of a predicted curve, and along each side of a contour plot


def plot_all(results: Sequence[Result], directory: Path) -> list[Path]:
    """Every picture the results are enough for; returns the files written.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
    """
    require_matplotlib()
    measured = [result for result in results if result.refusal is None]
    paths = [
        plot_stages([result for result in measured if result.shape == shape], directory)
        for shape in dict.fromkeys(result.shape for result in measured)
    ]
    if len({result.shape.rows for result in measured}) > 1:
        paths.append(plot_rate(measured, directory / "rate_over_rows.png"))
    return paths


def plot_stages(results: Sequence[Result], directory: Path) -> Path:
    """Bars of one shape: stages where the engines name them, else phases; beside them, on a GPU,
    the floor of each.
    """
    shape = results[0].shape
    bars = [bars_of(result) for result in results]
    # Stages in the order in which they run; an engine that names no stages has bars of phases, at
    # the end.
    order = [
        *(stage for stages in PHASE_STAGES.values() for stage in stages),
        "other",
        *PHASE_STAGES,
    ]
    names = [name for name in order if any(name in one for one in bars)]
    series = [(result.variant, one) for result, one in zip(results, bars, strict=True)]
    for fp8 in sorted({result.fp8 for result in results if result.gpu}, reverse=True):
        like = [result for result in results if result.gpu and result.fp8 == fp8]
        kind = "FP8: DeepGEMM-class GEMMs" if fp8 else "BF16: cuBLAS-class GEMMs"
        series.append((f"floor, {kind}, copy bandwidth", floor_bars(like, names)))
    figure = new_figure((max(7.0, 1.1 * len(names)), 5))
    axes = figure.subplots()
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series):
        # Bars of one stage stand side by side around its tick.
        positions = [i + (index - (len(series) - 1) / 2) * width for i in range(len(names))]
        heights = [values.get(name, 0.0) for name in names]
        style = {"color": FLOOR_COLOURS["FP8" in label]} if label.startswith("floor") else {}
        axes.bar(positions, heights, width, label=label, edgecolor="black", linewidth=0.4, **style)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("microseconds")
    axes.set_title(str(shape))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return save_figure(figure, directory / f"stages_{'_'.join(map(str, vars(shape).values()))}.png")


def bars_of(result: Result) -> dict[str, float]:
    """Microseconds per named stage (unnamed work under "other"), else per phase."""
    if any(result.stages.keys() - {""}):
        named = {
            stage: result.stages[stage]
            for stages in PHASE_STAGES.values()
            for stage in stages
            if stage in result.stages
        }
        other = {"other": sum(us for stage, us in result.stages.items() if stage not in named)}
        return {**named, **other}
    return result.busy or {phase: result.wall[phase].median for phase in PHASE_STAGES}


def floor_bars(results: Sequence[Result], names: Sequence[str]) -> dict[str, float]:
    """The floor under each bar, of every stage that one of these results has; a phase's is the sum
    of its stages'.
    """
    ideal = {stage: floor.us for result in results for stage, floor in result.floors.items()}
    phases = {
        phase: sum(ideal.get(stage, 0.0) for stage in stages)
        for phase, stages in PHASE_STAGES.items()
    }
    return {name: (ideal | phases).get(name, 0.0) for name in names}


def plot_rate(results: Sequence[Result], path: Path) -> Path:
    """MFU (TFLOPS where there is no peak) over T*K, a line per engine and (H, I, E)."""
    lines: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        shape = result.shape
        lines[(result.variant, shape.hidden, shape.intermediate, shape.experts)].append(result)
    # One quantity for all lines: shares of a peak and plain rates do not compare.
    on_gpu = all(result.gpu and result.has_peaks for result in results)
    figure = new_figure((7, 5))
    axes = figure.subplots()
    for (variant, hidden, intermediate, experts), line in lines.items():
        line.sort(key=lambda result: result.shape.rows)
        values = [100 * (result.mfu or 0.0) if on_gpu else result.tflops for result in line]
        label = f"{variant}, H={hidden} I={intermediate} E={experts}"
        axes.plot([result.shape.rows for result in line], values, marker="o", label=label)
    _over_rows(axes, "MFU, % of the peak of the operands' format" if on_gpu else "TFLOPS")
    return save_figure(figure, path)


def _over_rows(axes: Any, quantity: str) -> None:
    """The frame of a picture over T*K, once its lines are drawn."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("T * K")
    axes.set_ylabel(quantity)
    axes.grid(alpha=0.3)
    axes.legend()


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
    # An odd number of widths leaves a panel of the grid without points.
    for axis in axes[len(widths) :]:
        axis.set_visible(False)
    for axis, width in zip(axes, widths, strict=False):
        own = [point for point in points if (point.hidden, point.intermediate) == width]
        _draw_panel(axis, model, own, colours)
        axis.set_title(f"H={width[0]} I={width[1]}")
    figure.suptitle(
        f"{points[0].group}: dots measured (hollow: held out), lines predicted, {model.held_out_mape:.2f} % off"
    )
    return save_figure(figure, path)


def _draw_panel(
    axis: Any, model: CostModel, points: Sequence[Point], colours: dict[int, str]
) -> None:
    """Points of one (H, I)."""
    peak = PEAK_TFLOPS["fp8" if model.fp8 else "bf16"]
    for (_, _, experts), line in groups(points):
        colour = colours[experts]
        for held_out in (False, True):
            shown = [point for point in line if (point.shape in model.held_out) == held_out]
            axis.plot(
                [point.shape.rows for point in shown],
                [100 * point.shape.flop / (point.us or np.nan) / 1e6 / peak for point in shown],
                "o",
                color=colour,
                markerfacecolor="none" if held_out else colour,
            )
        curve = [
            Shape(**{**vars(line[0].shape), "tokens": tokens})
            for tokens in _steps(line[0].tokens, line[-1].tokens)
        ]
        rows = [shape.rows for shape in curve]
        axis.plot(rows, 100 * model.mfu(curve), color=colour, label=f"E={experts}")
    _over_rows(axis, f"MFU, % of {peak:.0f} TFLOPS")


def _steps(first: int, last: int) -> list[int]:
    """Whole numbers at equal ratios."""
    steps = np.unique(np.geomspace(first, last, RESOLUTION).round().astype(int))
    return [int(step) for step in steps]


def plot_contours(model: CostModel, points: Sequence[Point], path: Path) -> Path:
    """Predicted MFU over (log T*K, E) for the widest (H, I) measured; crosses mark measured points."""
    widest = max(points, key=lambda p: p.hidden * p.intermediate)
    own = [p for p in points if (p.hidden, p.intermediate) == (widest.hidden, widest.intermediate)]
    tokens = _steps(min(p.tokens for p in own), max(p.tokens for p in own))
    # A token cannot pick more experts than there are.
    least = max(min(p.experts for p in own), widest.topk)
    # At least one doubling of E, because a contour needs two rows.
    experts = _steps(least, max(2 * least, *(p.experts for p in own)))
    shapes = [
        Shape(t, widest.hidden, widest.intermediate, e, widest.topk)
        for e in experts
        for t in tokens
    ]
    values = 100 * model.mfu(shapes).reshape(len(experts), len(tokens))
    figure = new_figure((7, 5))
    axes = figure.subplots()
    lines = axes.contourf(
        np.array(tokens) * widest.topk, experts, values, levels=16, cmap="viridis"
    )
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
