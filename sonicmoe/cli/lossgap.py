"""`sonicmoe lossgap`: the loss gap of `train --compare` runs over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from .numerics import print_table
from .refusals import Location, OneLineCommand

if TYPE_CHECKING:
    from ernie_compat.lossgap import GapRun, GapSummary, Interval


@click.command(cls=OneLineCommand)
@click.argument(
    "directories",
    nargs=-1,
    required=True,
    metavar="DIR...",
    type=Location(file_okay=False),
)
@click.option(
    "--plot",
    type=Location(dir_okay=False),
    metavar="FILE",
    help="Draw the gaps over the steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
def lossgap(
    directories: tuple[Path, ...], plot: Path | None, as_json: bool, markdown: bool
) -> None:
    """Summarise the gap between a precision and full precision over the runs in DIR...

    Each DIR is the --out of one `sonicmoe train --compare --seed N` run. Runs that differ in more
    than the seed are summarised apart. docs/performance.md says how to read the numbers.
    """
    from ernie_compat.lossgap import plot_gaps, read_run, summarise

    # Every directory is read before anything is printed: a bad one leaves no half of a report.
    runs = [read_run(directory) for directory in directories]
    summaries = summarise(runs)
    picture = None if plot is None else str(plot_gaps(runs, plot))
    if as_json:
        click.echo(json.dumps(to_json(runs, summaries, picture), indent=2, allow_nan=False))
        return
    print_table(run_table(runs), markdown)
    print_table(summary_table(summaries), markdown)
    for summary in summaries:
        click.echo(verdict(summary))
    if picture is not None:
        click.echo(f"plot: {picture}")


def run_table(runs: Sequence[GapRun]) -> Table:
    """One row per run."""
    table = Table("run", "seed", "gap %", "signed gap %", "held-out gap %")
    for run in runs:
        table.add_row(
            str(run.directory),
            str(run.seed),
            percent(run.gap),
            percent(run.signed_gap),
            percent(run.held_out_gap),
        )
    return table


def summary_table(summaries: Sequence[GapSummary]) -> Table:
    """One row per kind of run: means and 95 % intervals."""
    table = Table("runs of", "seeds", "gap %", "worst %", "signed gap %", "held-out gap %")
    for one in summaries:
        held_out = "–" if one.held_out_gap is None else interval(one.held_out_gap)
        table.add_row(
            one.kind,
            str(one.runs),
            interval(one.gap),
            percent(one.worst),
            interval(one.signed_gap),
            held_out,
        )
    return table


def verdict(summary: GapSummary) -> str:
    """The conclusion from the intervals, in a line."""
    if summary.runs < 2:
        return f"{summary.kind}: one seed; train more seeds for an interval"
    if not summary.shifted:
        return f"{summary.kind}: seeds explain the difference to full precision (the signed gap's interval contains 0)"
    direction = "worse" if summary.signed_gap.mean > 0 else "better"
    return f"{summary.kind}: {direction} than full precision beyond what seeds explain"


def percent(fraction: float | None) -> str:
    """`0.020`, or a dash."""
    return "–" if fraction is None or math.isnan(fraction) else f"{100 * fraction:.3f}"


def interval(one: Interval) -> str:
    """`0.020 [0.011, 0.029]`."""
    bounds = "" if math.isnan(one.low) else f" [{percent(one.low)}, {percent(one.high)}]"
    return percent(one.mean) + bounds


def to_json(
    runs: Sequence[GapRun], summaries: Sequence[GapSummary], plot: str | None
) -> dict[str, Any]:
    """Plain data; fractions, and None where a number is unknown."""
    listed = [
        {
            "directory": str(run.directory),
            **{
                name: getattr(run, name)
                for name in ("kind", "seed", "steps", "gap", "signed_gap", "held_out_gap")
            },
        }
        for run in runs
    ]
    return {
        "runs": listed,
        "summaries": [plain({**asdict(one), "shifted": one.shifted}) for one in summaries],
        "plot": plot,
    }


def plain(value: Any) -> Any:
    """NaN as None, at any depth."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
