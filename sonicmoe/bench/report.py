"""Results as tables for eyes. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .figures import Result
from .floors import PEAK_TFLOPS, floors
from .trace import short_name

COLUMNS = (
    "engine", "forward us", "backward us", "wall us", "±", "busy us", "wall/busy", "host us", "step us",
    "TFLOPS", "MFU", "GB/s", "peak MiB", "saved MiB", "speed-up",
)  # fmt: skip


def result_table(results: Sequence[Result]) -> Table:
    """One row per engine at one shape; speed-up of `pair_us` over the first engine that ran."""
    table = Table(*COLUMNS, title=str(results[0].shape), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    base = next((result.pair_us for result in results if result.pair_us), None)
    for result in results:
        table.add_row(result.variant, *(_cells(result, base) if result.refusal is None else ["not run"]))
    return table


def _cells(result: Result, base: float | None) -> list[str]:
    wall, pair = result.wall, result.wall["pair"]
    busy = result.busy
    return [
        _us(busy.get("forward", wall["forward"].median)),
        _us(busy.get("backward", wall["backward"].median)),
        _us(pair.median),
        f"{pair.percent:.1f} %",
        _us(result.pair_busy),
        _ratio(pair.median, result.pair_busy),
        _us(result.host["pair"].median) if result.gpu else "–",
        _us(wall["step"].median),
        _number(result.tflops, ".1f" if result.gpu else ".4f"),
        f"{result.mfu:.1%} of {result.peak_name}" if result.mfu is not None else "–",
        _number(result.gbytes_per_s, ",.0f" if result.gpu else ".2f"),
        _number(result.peak_mib, ",.0f"),
        _number(result.saved_mib, ",.1f"),
        _ratio(base, result.pair_us),
    ]


def notes(results: Sequence[Result]) -> list[str]:
    """Who did not run and why, and what the columns mean, in lines under the tables."""
    refusals = [f"{r.variant} did not run at {r.shape}: {r.refusal}" for r in results if r.refusal is not None]
    if any(result.gpu for result in results):
        return [
            *refusals,
            *(
                f"{r.variant}: the profiler saw no kernel; all figures are from wall times"
                for r in results
                if r.wall and not r.busy
            ),
            "forward, backward, busy: kernel time from the profiler; wall, ±: median and half interquartile range of CUDA-event times",
            "around whole calls on an idle GPU; step: wall time of node.step() plus preparing the weights; GB/s: least traffic over busy",
            f"MFU: of the dense peaks {PEAK_TFLOPS['fp8']:.0f} TFLOPS (FP8) and {PEAK_TFLOPS['bf16']:.0f} (BF16); "
            "TFLOPS: 18 T K H I / busy time of forward and backward",
        ]
    return [
        *refusals,
        "no GPU: host times of the reference engine, which is exact and not fast; they say nothing about a GPU",
    ]


def kernel_table(result: Result, limit: int) -> Table:
    """The kernels that cost most, with their share of the profiled time."""
    table = Table("us per call", "share", "kernel", title=f"{result.shape}, {result.variant}: GPU time by kernel")
    total = sum(result.kernels.values())
    for name, us in list(result.kernels.items())[:limit]:
        table.add_row(f"{us:,.1f}", f"{us / total:.1%}", short_name(name))
    rest = list(result.kernels.values())[limit:]
    if rest:
        table.add_row(f"{sum(rest):,.1f}", f"{sum(rest) / total:.1%}", f"{len(rest)} others")
    return table


def stage_table(result: Result) -> Table:
    """Stages against their floors; stages that the engine does not name are missing, their kernels stand under "unnamed"."""
    ideal = floors(result.shape, result.fp8)
    title = f"{result.shape}, {result.variant}: GPU time by stage"
    table = Table("stage", "us", "floor us", "over floor", "TFLOPS", "GB/s", title=title)
    for stage, us in result.stages.items():
        floor = ideal.get(stage)
        if floor is None:
            table.add_row(stage or "unnamed", _us(us), "–", "–", "–", "–")
            continue
        tflops = f"{floor.flop / us / 1e6:,.0f}" if floor.flop else "–"
        table.add_row(stage, _us(us), _us(floor.us), _ratio(us, floor.us), tflops, f"{floor.bytes / us / 1e3:,.0f}")
    return table


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "–"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
