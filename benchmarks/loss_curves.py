#!/usr/bin/env python3
"""The losses of finished runs of `sonicmoe train`, gathered in one file, and what FP8 costs by them.

    python benchmarks/loss_curves.py gather runs/scale/* --to docs/data/loss_curves.jsonl
    python benchmarks/loss_curves.py report docs/data/loss_curves.jsonl --plot docs/data/loss_gap.png

A line of the file is one run: its model, text, recipe and seed, the GPU, and every step's loss in FP8
and in full precision. A run that was trained without `--compare` is set beside the full-precision
losses of the same model, text and seed, which another line must have: they depend on nothing else.

The report has, for every model, text and recipe, over the last `--tail` steps: the signed gap, mean
of the FP8 losses over mean of the others, minus 1, positive where FP8 is worse; its mean over the
seeds with a 95 % interval by Student's t; the same of the loss on text that was held out; and how far
two full-precision runs of different seeds lie apart, the mean over the pairs. `--slope MODEL` fits a
line to the signed gap of each run, to see whether it grows.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ernie_compat.gap_runs import STUDENT_T, Interval
from ernie_compat.metrics import read_metrics
from ernie_compat.model_config import RunConfig
from ernie_compat.run_directory import SUMMARY_NAME
from ernie_compat.trainer import METRICS_NAME
from sonicmoe.plotting import new_figure, save_figure

DIGITS = 5  # of a loss in the file: 1e-5 of a loss near 1 is far below every gap
BLOCKS = 40  # that a curve is cut into before a line is fitted to it


@dataclass(frozen=True)
class Curve:
    """The losses of one run by step. text: what it read. full: in full precision, None where no twin
    was trained. held_out: at the end, of both, on text that was not trained on.
    """

    model: str
    text: str
    recipe: str
    seed: int
    gpu: str
    fp8: list[float]
    full: list[float] | None
    held_out: list[float | None]

    @property
    def kind(self) -> str:
        """What runs share that differ in the seed alone."""
        return f"{self.task}, {self.recipe}"

    @property
    def task(self) -> str:
        """What runs share that differ in seed and recipe."""
        return f"{self.model}, {len(self.fp8)} steps, {self.text}"


def read_run(directory: Path, text: str, recipe: str, gpu: str) -> Curve:
    """The run that `sonicmoe train --out directory` finished."""
    path = directory / SUMMARY_NAME
    if not path.is_file():
        raise click.ClickException(f"{directory} holds no finished run: {SUMMARY_NAME} is missing")
    summary = json.loads(path.read_bytes())
    config = RunConfig.from_json(summary["config"])
    records = read_metrics(directory / METRICS_NAME)
    steps = [record.step for record in records]
    if steps != list(range(1, config.train.steps + 1)):
        raise click.ClickException(f"{directory} has no record of some of its steps")
    m = config.model
    model = (
        f"{summary['parameters'] / 1e6:.4g} M, H={m.hidden_size}, I={m.intermediate_size}, "
        f"E={m.num_experts}, K={m.topk}, L={m.num_layers}, engine {summary['engine_used']}"
    )
    full = [record.full_precision_loss for record in records]
    held_out = summary["held_out_loss"], summary["held_out_loss_full_precision"]
    return Curve(
        model,
        text,
        recipe,
        config.train.seed,
        gpu,
        [round(record.loss, DIGITS) for record in records],
        None if None in full else [round(loss, DIGITS) for loss in full if loss is not None],
        [None if loss is None else round(loss, DIGITS) for loss in held_out],
    )


def read_curves(path: Path) -> list[Curve]:
    """Every line of the file."""
    return [Curve(**json.loads(line)) for line in path.read_text().splitlines()]


def with_twins(curves: Sequence[Curve]) -> list[tuple[Curve, np.ndarray, np.ndarray]]:
    """Each run with its losses and the full-precision losses of its task and seed, fp64 `[steps]`; the
    held-out loss of the twin is put in where it is missing.
    """
    twins = {(c.task, c.seed): c for c in curves if c.full is not None}
    pairs = []
    for curve in curves:
        twin = twins.get((curve.task, curve.seed))
        if twin is None:
            raise click.ClickException(f"{curve.kind}: seed {curve.seed} has no full-precision run")
        whole = replace(curve, held_out=[curve.held_out[0], twin.held_out[1]])
        pairs.append((whole, np.asarray(curve.fp8), np.asarray(twin.full)))
    return pairs


def tail_gap(fp8: np.ndarray, full: np.ndarray, tail: int) -> float:
    """The signed gap over the last `tail` steps, a fraction."""
    return float(fp8[-tail:].mean() / full[-tail:].mean() - 1)


def spread(ends: Sequence[float]) -> float:
    """How far two of the values lie apart, as a fraction of their mean; the mean over all pairs."""
    pairs = list(itertools.combinations(ends, 2))
    return float(np.mean([2 * abs(a - b) / (a + b) for a, b in pairs])) if pairs else math.nan


def slope(fp8: np.ndarray, full: np.ndarray, blocks: int = BLOCKS) -> Interval:
    """Of the signed gap, a fraction for 1,000 steps, with its 95 % interval: least squares through the
    gaps of `blocks` equal parts of the run, without the first tenth, in which the learning rate rises.

    Neighbouring parts err alike, which makes the textbook interval too narrow: n parts with a
    correlation r of neighbouring residuals count as n (1 - r) / (1 + r) independent ones (an
    autoregression of order 1; Student's t with so many degrees of freedom less two).
    """
    first = len(fp8) // 10
    s, r = (np.array_split(losses[first:], blocks) for losses in (fp8, full))
    gaps = np.array([a.mean() / b.mean() - 1 for a, b in zip(s, r, strict=True)])
    thousands = (np.arange(blocks) - (blocks - 1) / 2) * (len(fp8) - first) / blocks / 1000
    value = float(gaps @ thousands / (thousands @ thousands))
    rest = gaps - gaps.mean() - value * thousands
    correlation = max(0.0, float(rest[1:] @ rest[:-1] / (rest @ rest)))
    free = max(1, round(blocks * (1 - correlation) / (1 + correlation)) - 2)
    error = math.sqrt(float(rest @ rest) / free / float(thousands @ thousands))
    half = STUDENT_T[min(free, len(STUDENT_T)) - 1] * error
    return Interval(value, value - half, value + half, error)


def interval(one: Interval) -> str:
    """In percent, with its bounds where it has some."""
    bounds = "" if math.isnan(one.low) else f" [{100 * one.low:+.3f}, {100 * one.high:+.3f}]"
    return f"{100 * one.mean:+.3f}{bounds}"


@click.group(help=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
def main() -> None:
    """Gather losses, or report of them."""


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--to", "path", required=True, type=click.Path(path_type=Path, dir_okay=False),
              help="File that gets a line for each run; one that has the run is replaced.")  # fmt: skip
@click.option("--text", default="standard library", show_default=True, help="What they read.")
@click.option("--recipe", default="dx256", show_default=True, help="Of the FP8 experts.")
@click.option("--gpu", default="CPU", show_default=True, help="What the runs ran on.")
def gather(runs: Sequence[Path], path: Path, text: str, recipe: str, gpu: str) -> None:
    """Add the losses of RUNS, each the --out of one `sonicmoe train`, to a file."""
    curves = {(c.kind, c.seed): c for c in (read_curves(path) if path.exists() else [])}
    curves |= {(c.kind, c.seed): c for c in (read_run(run, text, recipe, gpu) for run in runs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(curves[key]), separators=(",", ":")) for key in sorted(curves)]
    path.write_text("\n".join(lines) + "\n")
    click.echo(f"{path}: {len(lines)} runs")


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tail", type=click.IntRange(1), default=500, show_default=True, help="Last steps.")
@click.option("--until", type=click.IntRange(1), help="Take these steps for the last ones.")
@click.option("--slope", "sloped", metavar="MODEL", help="Models whose name starts so get a slope.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the gaps.")
def report(path: Path, tail: int, until: int | None, sloped: str | None, plot: Path | None) -> None:
    """Print the gaps of the runs in PATH, by model and recipe, in percent."""
    pairs = [(c, fp8[:until], full[:until]) for c, fp8, full in with_twins(read_curves(path))]
    for kind in dict.fromkeys(curve.kind for curve, _, _ in pairs):
        own = [pair for pair in pairs if pair[0].kind == kind]
        click.echo(f"{kind}, on {', '.join(sorted({curve.gpu for curve, _, _ in own}))}")
        gaps = [tail_gap(fp8, full, tail) for _, fp8, full in own]
        for (curve, fp8, full), gap in zip(own, gaps, strict=True):
            ends = f"loss {fp8[-tail:].mean():.4f} in FP8, {full[-tail:].mean():.4f} without"
            held_out = f"held-out {curve.held_out[0]:.4f}, {curve.held_out[1]:.4f}"
            click.echo(f"    seed {curve.seed}: {100 * gap:+.3f}; {ends}; {held_out}")
            if sloped is not None and curve.model.startswith(sloped):
                click.echo(f"        slope for 1,000 steps {interval(slope(fp8, full))}")
        outside = [curve.held_out[0] / curve.held_out[1] - 1 for curve, _, _ in own]
        click.echo(f"    signed gap on held-out text: {interval(Interval.of(outside))}")
        apart = spread([float(full[-tail:].mean()) for _, _, full in own])
        last = f"{tail} steps" if until is None else f"{tail} steps before {until}"
        click.echo(f"    signed gap of the last {last}: {interval(Interval.of(gaps))}")
        if not math.isnan(apart):
            click.echo(f"    two full-precision runs of different seeds: {100 * apart:.3f} apart")
    if plot is not None:
        click.echo(f"plot: {draw(pairs, tail, plot)}")


def draw(pairs: Sequence[tuple[Curve, np.ndarray, np.ndarray]], tail: int, path: Path) -> Path:
    """Signed gap over steps, averaged over a tenth of `tail`: a panel for each task."""
    tasks = list(dict.fromkeys(curve.task for curve, _, _ in pairs))
    figure = new_figure((8, 3 * len(tasks)))
    panels = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
    window = np.ones(max(1, tail // 10)) / max(1, tail // 10)
    for axes, task in zip(panels, tasks, strict=True):
        recipes = list(dict.fromkeys(c.recipe for c, _, _ in pairs if c.task == task))
        for curve, fp8, full in pairs:
            if curve.task == task:
                s, r = (np.convolve(losses, window, "valid") for losses in (fp8, full))
                steps = np.arange(len(window), len(fp8) + 1)
                label = f"{curve.recipe}, seed {curve.seed}"
                style = "-" if curve.recipe == recipes[0] else "--"
                axes.plot(steps, 100 * (s / r - 1), style, linewidth=0.8, label=label)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_ylim(-2, 2)
        axes.set_title(task, fontsize="small")
        axes.set_ylabel("FP8 over full precision, minus 1, %", fontsize="small")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2)
    panels[-1].set_xlabel("step")
    return save_figure(figure, path)


if __name__ == "__main__":
    main()
