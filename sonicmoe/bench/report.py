"""Results as tables for eyes. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from .figures import Result, Spread
from .floors import PEAK_TFLOPS
from .trace import short_name

NONE = "–"
OVER_PEER = "over DeepGEMM"


def time_table(results: Sequence[Result]) -> Table:
    """Times of one shape by phase and by clock, a row per engine."""
    return _table(str(results[0].shape), results, _times)


def rate_table(results: Sequence[Result]) -> Table:
    """Rates and memory at the same shape; speed-up in `pair_us` over the first engine that ran, and
    in the steady state.
    """
    ran = [result for result in results if result.pair_us]
    return _table_beside_peer(ran, _rates, lambda result: result.pair_us)


def sustained_table(results: Sequence[Result]) -> Table:
    """Time, clock, power and energy per layer of the sustained rows at the same shape; ratios over
    the first engine that has one.
    """
    ran = [result for result in results if result.sustained]
    return _table_beside_peer(
        ran,
        _sustained,
        lambda result: result.sustained.us.median if result.sustained else None,
    )


def _table_beside_peer(
    ran: Sequence[Result],
    cells_of: Callable[[Result, Result | None], dict[str, str]],
    time_of: Callable[[Result], float | None],
) -> Table:
    """A row for each result: its cells beside the first result's, and its time over the peer's."""
    base = ran[0] if ran else None
    peer = next((result for result in ran if result.peer), None)

    def over_peer(result: Result) -> str:
        return NONE if peer is None or result.peer else _ratio(time_of(result), time_of(peer))

    return _table(
        None, ran, lambda result: {**cells_of(result, base), OVER_PEER: over_peer(result)}
    )


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


def _rates(result: Result, base: Result | None) -> dict[str, str]:
    assert base is not None
    steady = (
        _speed_up(result, base.steady.median, result.steady.median)
        if base.steady and result.steady
        else NONE
    )
    return {
        "TFLOPS": _number(result.tflops, ".1f" if result.gpu else ".4f"),
        "MFU": f"{result.mfu:.1%} of {result.peak_name}" if result.mfu is not None else NONE,
        "GB/s": _number(result.gbytes_per_s, ",.0f" if result.gpu else ".2f"),
        "peak MiB": _number(result.peak_mib, ",.0f"),
        "saved MiB": _number(result.saved_mib, ",.1f"),
        "gradient MiB": _number(result.gradient_mib, ",.0f"),
        "speed-up": _speed_up(result, base.pair_us, result.pair_us),
        "steady speed-up": steady,
    }


def _sustained(result: Result, base: Result | None) -> dict[str, str]:
    row = result.sustained
    assert row is not None and base is not None and base.sustained is not None
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
        "sustained speed-up": _speed_up(result, base.sustained.us.median, row.us.median),
        **power,
    }


def notes(results: Sequence[Result]) -> list[str]:
    """Lines under the tables: the variants that did not run, with reasons, and the columns'
    meanings.
    """
    refusals = [
        f"{r.variant} did not run at {r.shape}: {r.refusal}"
        for r in results
        if r.refusal is not None
    ]
    refusals += [
        f"{r.variant} at {r.shape}: no clock, power and energy: {r.sustained.unavailable}"
        for r in results
        if r.sustained and r.sustained.unavailable
    ]
    if any(r.sustained for r in results):
        sources = {r.sustained.source for r in results if r.sustained and r.sustained.source}
        refusals += [
            "sustained: per layer of the same steps back to back for seconds (--sustained), behind others that let clocks settle; "
            f"W: of the whole board{''.join(f', from {s}' for s in sorted(sources))}; J/layer: W times sustained"
        ]
    if any(result.gpu for result in results):
        return [
            *refusals,
            *(
                f"{r.variant}: the profiler saw no kernel; all figures are from wall times"
                for r in results
                if r.wall and not r.busy
            ),
            *(
                f"{r.variant}: several layers of {r.shape} do not fit at once; no steady state (fewer --layers, or --no-peer)"
                for r in results
                if r.wall and r.steady is None
            ),
            "forward, backward, busy: kernel time from the profiler, each phase synchronised; wall: one call on an idle GPU; "
            "host: until its launches returned; ±: half interquartile range",
            "steady, steady busy: per layer of steps issued back to back (--layers forwards, one backward() for all), by the clock "
            "and as time in which the GPU worked: what a training step pays",
            "step: wall time of node.step(), with a flush where gradients wait in the node, plus preparing the weights; "
            "GB/s: least traffic over busy",
            *(
                [
                    f"{OVER_PEER}: time over that of the six GEMMs alone, whose operands are quantised beforehand: they gather, "
                    "activate, quantise, route and aggregate nothing"
                ]
                if any(r.peer and r.wall for r in results)
                else []
            ),
            "gradient MiB: fp32 gradients that the node holds beside main_grad; 0 where every backward adds straight into it",
            (
                f"MFU: of the dense peaks {PEAK_TFLOPS['fp8']:.0f} TFLOPS (FP8) and {PEAK_TFLOPS['bf16']:.0f} (BF16); "
                if all(r.has_peaks for r in results)
                else "MFU, floors: not known for this architecture; "
            )
            + "TFLOPS: 18 T K H I / busy time of forward and backward",
        ]
    return [
        *refusals,
        "no GPU: host times of the reference engine, which is exact and not fast; they say nothing about a GPU",
    ]


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
            table.add_row(stage or "unnamed", _us(us), NONE, NONE, NONE, NONE)
            continue
        tflops = f"{floor.flop / us / 1e6:,.0f}" if floor.flop else NONE
        table.add_row(
            stage,
            _us(us),
            _us(floor.us),
            _ratio(us, floor.us),
            tflops,
            NONE if result.peer else f"{floor.bytes / us / 1e3:,.0f}",
        )
    return table


def _us(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _spread(spread: Spread | None) -> str:
    return NONE if spread is None else f"{spread.median:,.0f} ±{spread.percent:.1f} %"


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else NONE


def _speed_up(result: Result, base: float | None, own: float | None) -> str:
    """Nothing for a peer, which does only part of the work."""
    return NONE if result.peer else _ratio(base, own)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
