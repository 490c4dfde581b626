#!/usr/bin/env python3
"""The engines beside DeepGEMM's six bare GEMMs of the same layer, in turns. Needs a Hopper GPU and
`deep_gemm` 2.6, which is no dependency.

    benchmarks/deepgemm_bench.py --shape reference --shape fine-grained --sustained 2

| column | what |
|---|---|
| busy us | kernel time of forward and backward, of single calls |
| sustained us, J/layer | time and energy per layer of the same steps back to back for seconds |
| over | that time over DeepGEMM's: what gathering, activating, quantising, routing and aggregating cost |

Two more tables have each GEMM, and with `--turns` the stages of all: medians over so many profiles
of each, in turns, so that all of them see the same clocks. `--json` prints every figure. Operands are
quantised before anything is timed, and a sample of each output is compared with the product of its
operands.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from deepgemm_gemms import PeerError, load, prepare
from rich.console import Console
from rich.table import Table

from sonicmoe.bench import runner
from sonicmoe.bench.figures import Result
from sonicmoe.bench.floors import gemm_flop
from sonicmoe.bench.runner import result_of, time_all, warmed_up
from sonicmoe.bench.shapes import SHAPES, Shape
from sonicmoe.bench.tables import NONE, ratio
from sonicmoe.bench.workload import Layer, Variant, available_variants, rotating_batches

NAME = "DeepGEMM (six GEMMs)"


def measure(
    shape: Shape,
    variants: list[Variant],
    device: str,
    sustained_s: float,
    layers: int | None = None,
    turns: int = 0,
) -> tuple[list[Result], dict[str, dict[str, float]]]:
    """The six GEMMs first, then the engines, all with the rows per expert of the same batches; and
    what `stages_in_turns` says of them.

    Raises:
        PeerError: the GEMMs do not take these sizes, or are wrong.
    """
    layer, batches = Layer(shape, device), rotating_batches(shape, device)
    six = prepare(load(), shape, [batch.counts for batch in batches], device)
    runs: dict[int, Any] = {0: six}
    results = [Result(shape, NAME, fp8=True, gpu=True)]
    for variant in variants:
        runs[len(results)] = warmed_up(layer, variant, batches)
        results.append(result_of(shape, variant, device))
    stages = stages_in_turns(runs, results, turns)
    time_all(runs, results, device, sustained_s, layers)
    return results, stages


def stages_in_turns(
    runs: dict[int, Any], results: list[Result], turns: int
) -> dict[str, dict[str, float]]:
    """Median microseconds of every stage, by variant."""

    def stages(index: int) -> dict[str, float]:
        runner.profile(runs[index], results[index])
        return results[index].stages

    found = runner.in_turns({index: index for index in runs}, turns, stages)
    return {
        results[index].variant: {stage: median(row[stage] for row in rows) for stage in rows[0]}
        for index, rows in found.items()
        if rows
    }


def figures(results: list[Result]) -> list[dict[str, Any]]:
    """Of every result: its times and energy, and the ratios to the first."""
    found = []
    for result in results:
        row = result.sustained
        found.append({
            "engine": result.variant,
            "busy_us": result.pair_busy,
            "sustained_us": row.us.median if row else None,
            "joules": row.joules if row else None,
        })  # fmt: skip
    return found


def engine_table(results: list[Result]) -> Table:
    """A row for each, the GEMMs first."""
    heads = ("engine", "busy us", "over", "sustained us", "over", "J/layer")
    table = Table(*heads, title=str(results[0].shape), title_justify="left")
    rows = figures(results)
    for row in rows:
        cells = [row["engine"]]
        for name in ("busy_us", "sustained_us"):
            cells += [_number(row[name], ",.0f"), ratio(row[name], rows[0][name])]
        table.add_row(*cells, _number(row["joules"], ".3g"))
    return table


def gemm_table(result: Result) -> Table:
    """Busy time and rate of each GEMM."""
    table = Table("GEMM", "us", "TFLOPS", title=f"{result.shape}, {NAME}", title_justify="left")
    flop = gemm_flop(result.shape)
    for name, us in result.stages.items():
        table.add_row(name, f"{us:,.0f}", f"{flop[name] / us / 1e6:,.0f}")
    return table


def turn_table(stages: dict[str, dict[str, float]]) -> Table:
    """A row for each stage, a column for each variant."""
    table = Table("stage, us", *stages, title="in turns", title_justify="left")
    for name in dict.fromkeys(name for own in stages.values() for name in own if name):
        table.add_row(name, *(_number(own.get(name), ",.0f") for own in stages.values()))
    return table


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


@click.command()
@click.option("--shape", "names", multiple=True, type=click.Choice(list(SHAPES)), default=("reference",), show_default=True)  # fmt: skip
@click.option("--engine", "engines", multiple=True, help="As in `sonicmoe bench`.  [default: every GPU engine]")  # fmt: skip
@click.option("--layers", type=int, help="Layers of a step.  [default: as suit the shape]")
@click.option("--sustained", default=2.5, show_default=True, help="Seconds of each; 0 leaves them out.")  # fmt: skip
@click.option("--turns", default=0, show_default=True, help="Profiles of each in turns.")
@click.option("--json", "as_json", is_flag=True)
def main(
    names: tuple[str, ...],
    engines: tuple[str, ...],
    layers: int | None,
    sustained: float,
    turns: int,
    as_json: bool,
) -> None:
    """Measure and print."""
    device = runner.find_device()
    if device == "cpu":
        raise click.ClickException("needs a Hopper GPU")
    variants = [Variant.parse(name) for name in engines] or available_variants(device)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in names:
        try:
            results, stages = measure(SHAPES[name], variants, device, sustained, layers, turns)
        except PeerError as error:
            raise click.ClickException(f"{SHAPES[name]}: {error}") from None
        if as_json:
            every = [result.to_json() for result in results]
            line = {"machine": runner.machine(), "rows": figures(results), "turns": stages}
            click.echo(json.dumps({"shape": vars(SHAPES[name]), **line, "results": every}))
        else:
            console.print(engine_table(results))
            console.print(gemm_table(results[0]))
            if stages:
                console.print(turn_table(stages))


if __name__ == "__main__":
    main()
