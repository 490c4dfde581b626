"""Results, and a fitted cost model, as tables for eyes. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.table import Table

from .cost_model import CostModel, mape
from .figures import Result, Spread
from .floors import PEAK_TFLOPS
from .points import Point
from .shapes import Shape
from .trace import short_name

NONE = "–"
GROUPS: dict[str, Callable[[Shape], tuple[int, ...]]] = {
    "T": lambda shape: (shape.tokens,),
    "E": lambda shape: (shape.experts,),
    "H, I": lambda shape: (shape.hidden, shape.intermediate),
}


def time_table(results: Sequence[Result]) -> Table:
    """Times of one shape by phase and by clock, a row per engine."""
    return _table(str(results[0].shape), results, _times)


def rate_table(results: Sequence[Result]) -> Table:
    """Rates and memory at the same shape; speed-up in `pair_us` over the first engine that ran, and
    in the steady state.
    """
    ran = [result for result in results if result.pair_us]
    return _table(None, ran, lambda result: _rates(result, ran[0]))


def sustained_table(results: Sequence[Result]) -> Table:
    """Time, clock, power and energy per layer of the sustained rows at the same shape; speed-up
    over the first engine that has one.
    """
    ran = [result for result in results if result.sustained]
    return _table(None, ran, lambda result: _sustained(result, ran[0]))


def _table(
    title: str | None, results: Sequence[Result], cells: Callable[[Result], dict[str, str]]
) -> Table:
    """A row per engine; columns in which nobody has a figure are left out."""
    # A variant that refused has no figures and keeps its row.
    rows = [cells(result) if result.refusal is None else {} for result in results]
    heads = dict.fromkeys(head for row in rows for head, cell in row.items() if cell != NONE)
    table = Table("engine", *heads, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for result, row in zip(results, rows, strict=True):
        table.add_row(result.variant, *([row[head] for head in heads] if row else ["not run"]))
    return table


def _times(result: Result) -> dict[str, str]:
    wall, busy = result.wall, result.busy
    return {
        "forward us": _us(busy.get("forward", wall["forward"].median)),
        "backward us": _us(busy.get("backward", wall["backward"].median)),
        "busy us": _us(result.pair_busy),
        "wall us": _spread(wall["pair"]),
        "host us": _us(result.host["pair"].median) if result.gpu else NONE,
        "steady us": _spread(result.steady),
        "steady busy us": _spread(result.steady_busy),
        "steady/busy": _number(result.steady_ratio, ".3f"),
        "step us": _us(wall["step"].median if "step" in wall else None),
    }


def _rates(result: Result, base: Result) -> dict[str, str]:
    steady = [each.steady.median if each.steady else None for each in (base, result)]
    return {
        # A host computes a few GFLOPS, which one decimal of TFLOPS would round to zero.
        "TFLOPS": _number(result.tflops, ".1f" if result.gpu else ".4f"),
        "MFU": f"{result.mfu:.1%} of {result.peak_name}" if result.mfu is not None else NONE,
        "GB/s": _number(result.gbytes_per_s, ",.0f" if result.gpu else ".2f"),
        "peak MiB": _number(result.peak_mib, ",.0f"),
        "saved MiB": _number(result.saved_mib, ",.1f"),
        "gradient MiB": _number(result.gradient_mib, ",.0f"),
        "speed-up": ratio(base.pair_us, result.pair_us),
        "steady speed-up": ratio(*steady),
    }


def _sustained(result: Result, base: Result) -> dict[str, str]:
    row = result.sustained
    assert row is not None and base.sustained is not None
    power = {
        "SM MHz": _number(row.sm_mhz, ",.0f"),
        "W": _number(row.watts, ".0f"),
        "W limit": _number(row.limit_watts, ".0f"),
        "J/layer": _number(row.joules, ".3g"),
    }
    if row.unavailable:
        # The columns stay, so that nobody takes a missing figure for one that was not asked for.
        power |= dict.fromkeys(["SM MHz", "W", "J/layer"], "no NVML")
    return {
        "sustained us": _spread(row.us),
        "sustained speed-up": ratio(base.sustained.us.median, row.us.median),
        **power,
    }


def notes(results: Sequence[Result]) -> list[str]:
    """Lines under the tables: what is missing, with reasons, and the columns' meanings."""
    lines = [line for result in results for line in _missing(result)]
    if not any(result.gpu for result in results):
        lines.append(
            "no GPU: host times of the reference engine, which is exact and not fast; they say "
            "nothing about a GPU"
        )
        return lines
    peaks = (
        f"MFU: of the dense peaks {PEAK_TFLOPS['fp8']:.0f} TFLOPS (FP8) and {PEAK_TFLOPS['bf16']:.0f} (BF16)"
        if all(result.has_peaks for result in results)
        else "MFU, floors: not known for this architecture"
    )
    return [*lines, f"{peaks}; what the columns are: docs/performance.md, method of sonicmoe bench"]


def _missing(result: Result) -> Iterator[str]:
    """What one result lacks, and why."""
    if result.refusal is not None:
        yield f"{result.variant} did not run at {result.shape}: {result.refusal}"
    if result.sustained and result.sustained.unavailable:
        reason = result.sustained.unavailable
        yield f"{result.variant} at {result.shape}: no clock, power and energy: {reason}"
    if result.gpu and result.wall and not result.busy:
        yield f"{result.variant}: the profiler saw no kernel; all figures are from wall times"
    if result.gpu and result.wall and result.steady is None:
        yield (
            f"{result.variant}: several layers of {result.shape} do not fit at once; no steady "
            "state (fewer --layers)"
        )


def kernel_table(result: Result, limit: int) -> Table:
    """The kernels that cost most, with their share of the profiled time."""
    table = Table(
        "us per call",
        "share",
        "kernel",
        title=f"{result.shape}, {result.variant}: GPU time by kernel",
    )
    total = sum(result.kernels.values())
    for name, us in list(result.kernels.items())[:limit]:
        table.add_row(f"{us:,.1f}", f"{us / total:.1%}", short_name(name))
    rest = list(result.kernels.values())[limit:]
    if rest:
        table.add_row(f"{sum(rest):,.1f}", f"{sum(rest) / total:.1%}", f"{len(rest)} others")
    return table


def stage_table(result: Result) -> Table:
    """Stages against their floors; stages that the engine does not name are missing, their kernels
    stand under "unnamed".
    """
    ideal = result.floors
    title = f"{result.shape}, {result.variant}: GPU time by stage"
    table = Table("stage", "us", "floor us", "over floor", "TFLOPS", "GB/s", title=title)
    for stage, us in result.stages.items():
        floor = ideal.get(stage)
        if floor is None:
            # Work outside every stage has no floor.
            table.add_row(stage or "unnamed", _us(us), NONE, NONE, NONE, NONE)
            continue
        tflops = f"{floor.flop / us / 1e6:,.0f}" if floor.flop else NONE
        gbytes = f"{floor.bytes / us / 1e3:,.0f}"
        table.add_row(stage, _us(us), _us(floor.us), ratio(us, floor.us), tflops, gbytes)
    return table


def term_table(model: CostModel, points: Sequence[Point]) -> Table:
    """Every term with its coefficient, and its share of the predicted time over all points."""
    shares = model.shares([point.shape for point in points])
    table = Table("term", "us per unit", "mean share of the time")
    for name, value in model.coefficients.items():
        # The knee is a fitted number, and the name of the term stands for it.
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
        for value in sorted(set(keys)):
            chosen = np.array([one == value for one in keys])
            _add_row(table, f"{group} = {', '.join(map(str, value))}", points, errors, chosen)
    return table


def _add_row(
    table: Table, name: str, points: Sequence[Point], errors: np.ndarray, chosen: np.ndarray
) -> None:
    # A group without points gets no row.
    own = errors[chosen]
    if not own.size:
        return
    spreads = [
        point.percent
        for point, inside in zip(points, chosen, strict=True)
        if inside and point.percent is not None
    ]
    table.add_row(
        name,
        str(own.size),
        f"{100 * own.mean():+.2f}",
        f"{mape(own):.2f}",
        f"{100 * own[np.abs(own).argmax()]:+.1f}",
        f"{np.mean(spreads):.2f}" if spreads else NONE,
    )


def _us(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _spread(spread: Spread | None) -> str:
    return NONE if spread is None else f"{spread.median:,.0f} ±{spread.percent:.1f} %"


def ratio(above: float | None, below: float | None) -> str:
    """With two decimals; a dash where one is unknown."""
    return f"{above / below:.2f}" if above and below else NONE


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
