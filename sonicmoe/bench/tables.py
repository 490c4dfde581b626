"""Results, and a fitted cost model, as tables for eyes. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from .cost_model import CostModel
from .figures import Result, Spread
from .floors import PEAK_TFLOPS
from .points import Point
from .trace import short_name

NONE = "–"
Pick = Callable[[Result], Any]
Cell = Callable[[Result, Result], str]  # of a result, beside the one that it is compared with
KERNELS = 12  # lines of the table of kernels


def result_table(results: Sequence[Result]) -> Table:
    """Every figure of one shape, a column per engine that ran; speed-ups are over the first.
    Figures that nobody has are left out.
    """
    table = Table(str(results[0].shape))
    for result in results:
        table.add_column(result.variant, justify="right")
    for name, cell in FIGURES.items():
        cells = [cell(result, results[0]) for result in results]
        if any(text != NONE for text in cells):
            table.add_row(name, *cells)
    return table


def _of(pick: Pick, form: str = ",.0f") -> Cell:
    """The cell of a number."""
    return lambda result, _: _number(pick(result), form)


def _time(pick: Pick) -> Cell:
    """The cell of a time, with its spread where it has one, and its speed-up."""

    def cell(result: Result, base: Result) -> str:
        own, first = pick(result), pick(base)
        if not own or not first:
            return NONE
        spread = f" ±{own.percent:.1f} %" if isinstance(own, Spread) else ""
        us, least = (each.median if isinstance(each, Spread) else each for each in (own, first))
        return f"{us:,.0f}{spread} ({ratio(least, us)}x)"

    return cell


def _power(name: str) -> Cell:
    """The cell of what NVML saw during the sustained row."""
    return _of(lambda result: result.sustained and getattr(result.sustained.power, name, None))


FIGURES: dict[str, Cell] = {
    "forward us": _of(lambda result: result.busy.get("forward")),
    "backward us": _of(lambda result: result.busy.get("backward")),
    "busy us": _time(lambda result: result.pair_busy),
    "TFLOPS": _of(lambda result: result.tflops, ".4g"),
    "MFU": _of(lambda result: result.mfu, ".1%"),
    "steady us": _time(lambda result: result.steady),
    "steady busy us": _of(lambda result: result.steady_busy),
    "steady/busy": _of(lambda result: result.steady_ratio, ".3f"),
    "sustained us": _time(lambda result: result.sustained and result.sustained.us),
    "SM MHz": _power("sm_mhz"),
    "W": _power("watts"),
    "W limit": _power("limit_watts"),
    "J/layer": _of(lambda result: result.sustained and result.sustained.joules, ".3g"),
    "step us": _of(lambda result: result.busy.get("step")),
    "peak MiB": _of(lambda result: result.peak_mib),
    "saved MiB": _of(lambda result: result.saved_mib, ",.1f"),
}


def notes(results: Sequence[Result]) -> list[str]:
    """Lines under the tables: what is missing, with reasons, and what the figures are."""
    lines = [line for result in results for line in _missing(result)]
    if not any(result.gpu for result in results):
        return [*lines, "no GPU: host times of the reference engine, which say nothing about a GPU"]
    peaks = " and ".join(f"{peak:.0f} TFLOPS ({name})" for name, peak in PEAK_TFLOPS.items())
    known = all(result.has_peaks for result in results)
    lines.append(f"MFU: of {peaks}" if known else "MFU, floors: not known for this architecture")
    return [*lines, "what the rows are: docs/lab/bench_method.md"]


def _missing(result: Result) -> Iterator[str]:
    """What one result lacks, and why."""
    name = f"{result.variant} at {result.shape}"
    if result.refusal is not None:
        yield f"{name} did not run: {result.refusal}"
        return
    if result.sustained and result.sustained.unavailable:
        yield f"{name}: no clock, power and energy: {result.sustained.unavailable}"
    if result.gpu and not result.busy:
        yield f"{name}: the profiler saw no kernel; rates are from wall times"
    if result.steady is None:
        yield f"{name}: several layers do not fit at once; no steady state"


def kernel_table(result: Result) -> Table:
    """The kernels that cost most, with their share of the profiled time."""
    title = f"{result.shape}, {result.variant}: GPU time by kernel"
    table = Table("us per call", "share", "kernel", title=title)
    total = sum(result.kernels.values())
    for name, us in list(result.kernels.items())[:KERNELS]:
        table.add_row(f"{us:,.1f}", f"{us / total:.1%}", short_name(name))
    rest = list(result.kernels.values())[KERNELS:]
    if rest:
        table.add_row(f"{sum(rest):,.1f}", f"{sum(rest) / total:.1%}", f"{len(rest)} others")
    return table


def stage_table(result: Result) -> Table:
    """Stages against their floors; work outside every stage stands under "unnamed"."""
    title = f"{result.shape}, {result.variant}: GPU time by stage"
    table = Table("stage", "us", "floor us", "over floor", title=title)
    for stage, us in result.stages.items():
        floor = result.floors.get(stage)
        cells = (_number(us, ",.0f"), _number(floor, ",.0f"), ratio(us, floor))
        table.add_row(stage or "unnamed", *cells)
    return table


def term_table(model: CostModel, points: Sequence[Point]) -> Table:
    """Every term with its coefficient, and its share of the predicted time over all points."""
    shares = model.shares([point.shape for point in points])
    table = Table("term", "us per unit", "mean share of the time")
    for name, value in model.coefficients.items():
        table.add_row(name, f"{value:.4g}", f"{shares[name]:.1%}")
    return table


def ratio(above: float | None, below: float | None) -> str:
    """With two decimals; a dash where one is unknown."""
    return f"{above / below:.2f}" if above and below else NONE


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
