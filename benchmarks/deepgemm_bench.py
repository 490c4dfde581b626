#!/usr/bin/env python3
"""The engines beside DeepGEMM's six bare GEMMs of the same layer, in turns. Needs a Hopper GPU and
`deep_gemm` 2.6, which is no dependency.

    benchmarks/deepgemm_bench.py --shape reference --shape fine-grained --sustained 2

The tables are those of `sonicmoe bench`: "(0.92x)" behind a time says that an engine, which also
gathers, activates, quantises, routes and aggregates, is 0.92 times as fast as the bare GEMMs. Then
every stage with its floor, and with `--turns` the stages of all: medians over so many profiles of
each, in turns, so that all of them see the same clocks. `--json` prints every figure. Operands are
quantised before anything is timed, and a sample of each output is compared with the product of its
operands.
"""

from __future__ import annotations

import importlib
import json
from statistics import median
from typing import Any

import click
import timing
from deepgemm_gemms import SixGemms
from timing import cell, markdown

from sonicmoe.bench import runner
from sonicmoe.bench.figures import Result
from sonicmoe.bench.runner import result_of, time_all, warmed_up
from sonicmoe.bench.shapes import SHAPES, Shape
from sonicmoe.bench.tables import result_table, stage_table
from sonicmoe.bench.workload import Layer, Variant, available_variants, rotating_batches
from sonicmoe.cli.screen import print_table

NAME = "DeepGEMM (six GEMMs)"


def measure(
    shape: Shape, variants: list[Variant], sustained_s: float, layers: int | None, turns: int
) -> tuple[list[Result], dict[str, dict[str, float]]]:
    """The six GEMMs first, then the engines, all with the rows per expert of the same batches; and
    what `stages_in_turns` says of them.
    """
    device = "cuda:0"
    layer, batches = Layer(shape, device), rotating_batches(shape, device)
    library, counts = importlib.import_module("deep_gemm"), [batch.counts for batch in batches]
    runs: dict[int, Any] = {0: SixGemms(library, shape, counts, device)}
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

    found = timing.in_turns({index: index for index in runs}, turns, stages)
    return {
        results[index].variant: {stage: median(row[stage] for row in rows) for stage in rows[0]}
        for index, rows in found.items()
        if rows
    }


def show(results: list[Result], stages: dict[str, dict[str, float]]) -> None:
    """Print engines beside the GEMMs, each GEMM, and the stages in turns."""
    print_table(result_table(results))
    print_table(stage_table(results[0]))
    names = dict.fromkeys(name for own in stages.values() for name in own if name)
    rows = ((name, *(cell(own.get(name)) for own in stages.values())) for name in names)
    if stages:
        click.echo(markdown(("in turns, us", *stages), rows))


@click.command()
@click.option("--shape", "names", multiple=True, type=click.Choice(list(SHAPES)), default=("reference",), show_default=True)  # fmt: skip
@click.option("--engine", "engines", multiple=True, help="As in `sonicmoe bench`.  [default: every GPU engine]")  # fmt: skip
@click.option("--layers", type=int, help="Layers of a step.  [default: as suit the shape]")
@click.option("--sustained", default=2.5, show_default=True, help="Seconds of each; 0 leaves them out.")  # fmt: skip
@click.option("--turns", default=0, show_default=True, help="Profiles of each in turns.")
@click.option("--json", "as_json", is_flag=True)
def main(
    names: tuple[str, ...], engines: tuple[str, ...], layers: int | None, sustained: float, turns: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure and print."""
    timing.device_of(quick=False)
    variants = [Variant.parse(name) for name in engines] or available_variants("cuda:0")
    for name in names:
        results, stages = measure(SHAPES[name], variants, sustained, layers, turns)
        if as_json:
            every = [result.to_json() for result in results]
            line = {"machine": timing.machine(), "turns": stages, "results": every}
            click.echo(json.dumps({"shape": vars(SHAPES[name]), **line}))
        else:
            show(results, stages)


if __name__ == "__main__":
    main()
