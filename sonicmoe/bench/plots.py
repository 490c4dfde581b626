"""Pictures of a benchmark, drawn off screen: time per stage against its floor, and MFU over T*K.
Imports no framework.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plotting import new_figure, require_matplotlib, save_figure
from .figures import Result
from .floors import PHASE_STAGES

FLOOR_COLOURS = ("gainsboro", "darkgrey")  # BF16, FP8


def plot_all(results: Sequence[Result], directory: Path) -> list[Path]:
    """Every picture the results are enough for; returns the files written.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
    """
    require_matplotlib()
    measured = [result for result in results if result.refusal is None]
    paths = [plot_stages(list(group), directory) for group in _by_shape(measured).values()]
    if len({result.shape.rows for result in measured}) > 1:
        paths.append(plot_rate(measured, directory / "rate_over_rows.png"))
    return paths


def _by_shape(results: Sequence[Result]) -> dict[Any, list[Result]]:
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.shape].append(result)
    return groups


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
    # A peer has no step.
    return result.busy or {
        phase: result.wall[phase].median for phase in PHASE_STAGES if phase in result.wall
    }


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
    on_gpu = all(result.gpu and result.has_peaks for result in results)
    figure = new_figure((7, 5))
    axes = figure.subplots()
    for (variant, hidden, intermediate, experts), line in lines.items():
        line.sort(key=lambda result: result.shape.rows)
        values = [100 * (result.mfu or 0.0) if on_gpu else result.tflops for result in line]
        label = f"{variant}, H={hidden} I={intermediate} E={experts}"
        axes.plot([result.shape.rows for result in line], values, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("T * K")
    axes.set_ylabel("MFU, % of the peak of the operands' format" if on_gpu else "TFLOPS")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, path)
