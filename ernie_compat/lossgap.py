"""`python -m ernie_compat.lossgap`: the loss gap of `train --compare` runs over seeds, or of two files
of losses.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from sonicmoe.errors import ConfigError, SonicMoEError, expect
from sonicmoe.plotting import new_figure, save_figure

from .gap_runs import GapRun, GapSummary, Interval, is_compared, read_run, summarise
from .loss_files import LossFile, compare_files, read_losses, without_missing

LABEL_WIDTH = 80  # characters of a line of the legend
Rows = Iterable[Sequence[str]]


class Refusal(click.ClickException):
    """Bad input, said in one line."""

    exit_code = 2


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)
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
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the gaps over the steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def lossgap(
    paths: tuple[Path, ...],
    column: str | None,
    skip_missing: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Summarise the gap in loss between a precision and full precision, in Markdown tables.

    Runs: each PATH is the --out of one `sonicmoe train --compare --seed N`. Runs that differ in
    more than the seed are summarised apart.

    Two files: the losses of a run, then those of its reference, of any program: CSV, one loss on
    each line, JSON lines, or transformers' trainer_state.json. Either may be the --out of a run of
    `sonicmoe train`, and both where neither was trained with --compare. Both need the same steps.

    docs/troubleshooting.md has the formats of files, docs/performance.md how to read the numbers.
    """
    try:
        _compare(paths, column, skip_missing, plot, as_json)
    except (SonicMoEError, OSError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def _compare(
    paths: Sequence[Path], column: str | None, skip_missing: bool, plot: Path | None, as_json: bool
) -> None:
    # Everything is read before anything is printed: a bad file leaves no half of a report.
    pair = is_pair(paths)
    for option, given in {"--column": column is not None, "--skip-missing": skip_missing}.items():
        what = f"{option} is for files of losses, and these are runs with --compare"
        expect(pair or not given, ConfigError, what)
    files: list[LossFile] = []
    skipped = 0
    if pair:
        first, second = (read_losses(path, column, keeps_missing=skip_missing) for path in paths)
        if skip_missing:
            first, second, skipped = without_missing(first, second)
        files, runs = [first, second], [compare_files(first, second)]
    else:
        runs = [read_run(path) for path in paths]
    summaries = summarise(runs)
    # Drawn before anything is printed, because a picture that cannot be written is an error.
    picture = None if plot is None else str(plot_gaps(runs, plot))
    if as_json:
        data = to_json(runs, summaries) | {
            "files": [one.to_json() for one in files],
            "skipped_steps": skipped,
            "plot": picture,
        }
        # NaN is no JSON. `to_json` has None in its place.
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    if files:
        heads = ("losses", "rows", "left out", "steps", "first", "end (mean)")
        print_table(heads, _file_rows(files))
    if skip_missing:
        click.echo(f"{skipped} steps without a loss in one of the files were dropped from both")
    print_gaps(runs, summaries)
    for summary in summaries:
        click.echo(verdict(summary))
    if picture is not None:
        click.echo(f"plot: {picture}")


def is_pair(paths: Sequence[Path]) -> bool:
    """Whether these are a run and its reference; else they are runs with `--compare`.

    Raises:
        ConfigError: a path is not there, or files come in another number than two.
    """
    for path in paths:
        expect(path.exists(), ConfigError, f"{path} is not there")
    # Two directories may be a run and its reference, or two seeds: --compare tells them apart.
    if all(path.is_dir() for path in paths):
        return len(paths) == 2 and not any(map(is_compared, paths))
    expect(
        len(paths) == 2,
        ConfigError,
        f"{len(paths)} paths, with files of losses among them; needed: two, the losses of a run and "
        "those of its reference",
    )
    return True


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


def _file_rows(files: Sequence[LossFile]) -> Rows:
    """What was read, so that a wrong column is seen."""
    for one in files:
        steps = "–" if one.steps is None else f"{one.steps[0]} to {one.steps[-1]}"
        end = f"{one.end:.4f} (last {one.window})"
        counts = str(len(one.losses)), str(one.left_out)
        yield str(one.path), *counts, steps, f"{one.losses[0]:.4f}", end


def _run_rows(runs: Sequence[GapRun]) -> Rows:
    for run in runs:
        seed = "–" if run.seed is None else str(run.seed)
        gaps = (run.gap, run.signed_gap, run.held_out_gap)
        yield str(run.directory), seed, *map(percent, gaps)


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
        "summaries": [_plain({**asdict(one), "shifted": one.shifted}) for one in summaries],
    }


def _plain(value: Any) -> Any:
    """NaN as None, at any depth."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _count(runs: Sequence[GapRun]) -> str:
    return "one run" if runs[0].seed is None else f"{len(runs)} seeds"


def plot_gaps(runs: Sequence[GapRun], path: Path) -> Path:
    """Signed gap over steps: a thin line per run, per kind the mean and the 95 % interval of the
    mean.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
    """
    figure = new_figure((8, 5))
    axes = figure.subplots()
    for number, kind in enumerate(dict.fromkeys(run.kind for run in runs)):
        own = [run for run in runs if run.kind == kind]
        # Runs of unequal length are compared as far as all of them go.
        length = min(run.steps for run in own)
        curves = 100 * np.stack([run.curve[:length] for run in own])
        # Losses out of files bring the steps that they were logged at.
        first = own[0].at
        steps = np.arange(1, length + 1) if first is None else first[:length]
        colour = f"C{number % 10}"
        for curve in curves:
            axes.plot(steps, curve, color=colour, alpha=0.3, linewidth=0.7)
        bands = [Interval.of(list(column)) for column in curves.T]
        # Names of files may be longer than the picture is wide.
        label = textwrap.fill(f"{kind}: {_count(own)}", LABEL_WIDTH)
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
