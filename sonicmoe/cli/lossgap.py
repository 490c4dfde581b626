"""`sonicmoe lossgap`: the loss gap of `train --compare` runs over seeds, or of two files of losses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ..errors import ConfigError, expect
from .numerics import print_table
from .refusals import Location, OneLineCommand
from .screen import Activity

if TYPE_CHECKING:
    from ernie_compat.loss_files import LossFile
    from ernie_compat.lossgap import GapRun, GapSummary, Interval


@click.command(cls=OneLineCommand)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=Location())
@click.option(
    "--column",
    metavar="NAME",
    help="Column, or key, of the loss in files; its number where a file has no header.  "
    "[default: loss, or the only column]",
)
@click.option(
    "--skip-missing",
    is_flag=True,
    help="Of two files: drop steps whose loss is nan, or absent, in one of them from both.",
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
    paths: tuple[Path, ...],
    column: str | None,
    skip_missing: bool,
    plot: Path | None,
    as_json: bool,
    markdown: bool,
) -> None:
    """Summarise the gap in loss between a precision and full precision.

    Runs: each PATH is the --out of one `sonicmoe train --compare --seed N`. Runs that differ in
    more than the seed are summarised apart.

    Two files: the losses of a run, then those of its reference, of any program: CSV, one loss on
    each line, JSON lines, or transformers' trainer_state.json. Either may be the --out of a run of
    `sonicmoe train`, and both where neither was trained with --compare. Both need the same steps.

    docs/troubleshooting.md has the formats of files, docs/performance.md how to read the numbers.
    """
    from ernie_compat.lossgap import plot_gaps, read_run, summarise

    # Everything is read before anything is printed: a bad file leaves no half of a report.
    with Activity("lossgap") as doing:
        pair = is_pair(paths)
        expect(
            pair or column is None,
            ConfigError,
            "--column is for files of losses, and these are runs with --compare",
        )
        expect(
            pair or not skip_missing,
            ConfigError,
            "--skip-missing is for files of losses, and these are runs with --compare",
        )
        doing.begin("reading", total=len(paths))
        files = read_pair(paths, column, doing, skip_missing) if pair else []
        skipped = 0
        if skip_missing:
            files, skipped = skip(files)
        runs = [compare_pair(files)] if pair else []
        for directory in () if pair else paths:
            doing.at(str(directory))
            runs.append(read_run(directory))
            doing.advance()
        summaries = summarise(runs)
        picture = None if plot is None else str(plot_gaps(runs, plot))
    if as_json:
        data = to_json(runs, summaries, files, picture)
        if skip_missing:
            data["skipped_steps"] = skipped
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    if files:
        print_table(file_table(files), markdown)
    if skip_missing:
        click.echo(f"{skipped} steps without a loss in one of the files were dropped from both")
    print_table(run_table(runs), markdown)
    print_table(summary_table(summaries), markdown)
    for summary in summaries:
        click.echo(verdict(summary))
    if picture is not None:
        click.echo(f"plot: {picture}")


def is_pair(paths: Sequence[Path]) -> bool:
    """Whether these are a run and its reference; else they are runs with `--compare`.

    Raises:
        ConfigError: a path is not there, or files come in another number than two.
    """
    from ernie_compat.lossgap import is_compared

    for path in paths:
        expect(path.exists(), ConfigError, f"{path} is not there")
    if all(path.is_dir() for path in paths):
        return len(paths) == 2 and not any(map(is_compared, paths))
    expect(
        len(paths) == 2,
        ConfigError,
        f"{len(paths)} paths, with files of losses among them; needed: two, the losses of a run and "
        "those of its reference",
    )
    return True


def skip(files: Sequence[LossFile]) -> tuple[list[LossFile], int]:
    """Both at the steps at which both have a loss, and how many were dropped."""
    from ernie_compat.loss_files import without_missing

    run, reference = files
    first, second, skipped = without_missing(run, reference)
    return [first, second], skipped


def read_pair(
    paths: Sequence[Path], column: str | None, doing: Activity, keeps_missing: bool
) -> list[LossFile]:
    """The losses of both, in order."""
    from ernie_compat.loss_files import read_losses

    files = []
    for path in paths:
        doing.at(str(path))
        files.append(read_losses(path, column, keeps_missing=keeps_missing))
        doing.advance()
    return files


def compare_pair(files: Sequence[LossFile]) -> GapRun:
    """The gap of the first against the second."""
    from ernie_compat.loss_files import compare_files

    run, reference = files
    return compare_files(run, reference)


def file_table(files: Sequence[LossFile]) -> Table:
    """What was read, so that a wrong column is seen."""
    table = Table("losses", "rows", "left out", "steps", "first", "end (mean)")
    for one in files:
        steps = "–" if one.steps is None else f"{one.steps[0]} to {one.steps[-1]}"
        table.add_row(
            str(one.path),
            str(len(one.losses)),
            str(one.left_out),
            steps,
            f"{one.losses[0]:.4f}",
            f"{one.end:.4f} (last {one.window})",
        )
    return table


def run_table(runs: Sequence[GapRun]) -> Table:
    """One row per run."""
    table = Table("run", "seed", "gap %", "signed gap %", "held-out gap %")
    for run in runs:
        table.add_row(
            str(run.directory),
            "–" if run.seed is None else str(run.seed),
            percent(run.gap),
            percent(run.signed_gap),
            percent(run.held_out_gap),
        )
    return table


def summary_table(summaries: Sequence[GapSummary]) -> Table:
    """One row per kind of run: means and 95 % intervals, and how far the seeds spread."""
    table = Table(
        "runs of",
        "seeds",
        "gap %",
        "worst %",
        "signed gap %",
        "its standard deviation",
        "held-out gap %",
    )
    for one in summaries:
        held_out = "–" if one.held_out_gap is None else interval(one.held_out_gap)
        table.add_row(
            one.kind,
            str(one.runs),
            interval(one.gap),
            percent(one.worst),
            interval(one.signed_gap),
            percent(one.signed_gap.deviation),
            held_out,
        )
    return table


def verdict(summary: GapSummary) -> str:
    """The conclusion from the intervals, in a line."""
    if summary.runs < 2:
        return (
            f"{summary.kind}: one run, which chance may explain; train more seeds for an interval"
        )
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
    runs: Sequence[GapRun],
    summaries: Sequence[GapSummary],
    files: Sequence[LossFile],
    plot: str | None,
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
        "files": [file_json(one) for one in files],
        "plot": plot,
    }


def file_json(one: LossFile) -> dict[str, Any]:
    """What was read from a file of losses."""
    return {
        "path": str(one.path),
        "rows": len(one.losses),
        "left_out": one.left_out,
        "steps": None if one.steps is None else [one.steps[0], one.steps[-1]],
        "first": one.losses[0],
        "end": one.end,
        "window": one.window,
    }


def plain(value: Any) -> Any:
    """NaN as None, at any depth."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
