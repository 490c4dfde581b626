"""`python -m ernie_compat.lossgap`: the loss gap of `train --compare` runs over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from sonicmoe.cli.refusals import OneLineCommand
from sonicmoe.diagnostics.json_data import plain
from sonicmoe.plotting import new_figure, save_figure

from .gap_runs import GapRun, GapSummary, Interval, read_run, summarise
from .metrics import smoothed
from .model_config import smoothing_window

Rows = Iterable[Sequence[str]]


@click.command(cls=OneLineCommand)
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the gaps over the steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def lossgap(paths: tuple[Path, ...], plot: Path | None, as_json: bool) -> None:
    """Summarise the gap in loss between a precision and full precision, in Markdown tables.

    Each PATH is the --out of one `sonicmoe train --compare --seed N`. Runs that differ in more than
    the seed are summarised apart. docs/lab/loss_gap.md has how to read the numbers.
    """
    # Everything is read before anything is printed: a bad file leaves no half of a report.
    runs = [read_run(path) for path in paths]
    summaries = summarise(runs)
    # Drawn before anything is printed, because a picture that cannot be written is an error.
    picture = None if plot is None else str(plot_gaps(runs, plot))
    if as_json:
        data = to_json(runs, summaries) | {"plot": picture}
        # NaN is no JSON. `to_json` has None in its place.
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    print_gaps(runs, summaries)
    for summary in summaries:
        click.echo(verdict(summary))
    if picture is not None:
        click.echo(f"plot: {picture}")


def print_gaps(runs: Sequence[GapRun], summaries: Sequence[GapSummary]) -> None:
    """A table with a row per run, and one with a row per kind of run: means and 95 % intervals, and
    how far the seeds spread.
    """
    print_table(("run", "seed", "gap %", "signed gap %", "held-out gap %"), _run_rows(runs))
    heads = ("runs of", "seeds", "gap %", "worst %", "signed gap %", "its standard deviation")
    print_table((*heads, "held-out gap %"), _summary_rows(summaries))


def print_table(heads: Sequence[str], rows: Rows) -> None:
    """In Markdown, which a terminal shows as well."""
    for cells in (heads, ["---"] * len(heads), *rows):
        click.echo(f"| {' | '.join(cells)} |")
    click.echo()


def _run_rows(runs: Sequence[GapRun]) -> Rows:
    for run in runs:
        gaps = (run.gap, run.signed_gap, run.held_out_gap)
        yield str(run.directory), str(run.seed), *map(percent, gaps)


def _summary_rows(summaries: Sequence[GapSummary]) -> Rows:
    for one in summaries:
        yield (
            one.kind,
            str(one.runs),
            interval(one.gap),
            percent(one.worst),
            interval(one.signed_gap),
            percent(one.signed_gap.deviation),
            "–" if one.held_out_gap is None else interval(one.held_out_gap),
        )


def verdict(summary: GapSummary) -> str:
    """The conclusion from the intervals, in a line."""
    if summary.runs < 2:
        said = "one run, which chance may explain; train more seeds for an interval"
    elif not summary.shifted:
        contains = "(the signed gap's interval contains 0)"
        said = f"seeds explain the difference to full precision {contains}"
    else:
        direction = "worse" if summary.signed_gap.mean > 0 else "better"
        said = f"{direction} than full precision beyond what seeds explain"
    return f"{summary.kind}: {said}"


def percent(fraction: float | None) -> str:
    """`0.020`, or a dash."""
    return "–" if fraction is None or math.isnan(fraction) else f"{100 * fraction:.3f}"


def interval(one: Interval) -> str:
    """`0.020 [0.011, 0.029]`."""
    bounds = "" if math.isnan(one.low) else f" [{percent(one.low)}, {percent(one.high)}]"
    return percent(one.mean) + bounds


def to_json(runs: Sequence[GapRun], summaries: Sequence[GapSummary]) -> dict[str, Any]:
    """Plain data; fractions, and None where a number is unknown."""
    figures = ("kind", "seed", "steps", "gap", "signed_gap", "held_out_gap")
    return {
        "runs": [
            {"directory": str(run.directory), **{name: getattr(run, name) for name in figures}}
            for run in runs
        ],
        "summaries": [plain({**asdict(one), "shifted": one.shifted}) for one in summaries],
    }


def plot_gaps(runs: Sequence[GapRun], path: Path) -> Path:
    """Signed gap over steps: a thin line per run, per kind the mean and the 95 % interval of the
    mean. PlotsUnavailableError without matplotlib.
    """
    figure = new_figure((8, 5))
    axes = figure.subplots()
    for number, kind in enumerate(dict.fromkeys(run.kind for run in runs)):
        own = [run for run in runs if run.kind == kind]
        # Runs of unequal length are compared as far as all of them go.
        length = min(run.steps for run in own)
        curves = 100 * np.stack([run.curve[:length] for run in own])
        # The middle of the steps that each smoothed loss is the mean of.
        steps = smoothed(range(1, length + 1), smoothing_window(own[0].steps))
        colour = f"C{number % 10}"
        for curve in curves:
            axes.plot(steps, curve, color=colour, alpha=0.3, linewidth=0.7)
        bands = [Interval.of(list(column)) for column in curves.T]
        label = f"{kind}: {len(own)} seeds"
        axes.plot(steps, [band.mean for band in bands], color=colour, label=label)
        low, high = ([getattr(band, end) for band in bands] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=colour, alpha=0.2)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("smoothed loss over full precision's, minus 1, %")
    axes.set_title("Loss gap: mean over seeds and its 95 % interval")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return save_figure(figure, path)


if __name__ == "__main__":
    lossgap(prog_name="python -m ernie_compat.lossgap")
