"""What `sonicmoe train` says and draws of a run at its beginning and at its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sonicmoe.plotting import PlotsUnavailableError, new_figure, save_figure

from .metrics import StepRecord, compared_losses, smoothed, write_whole
from .model_config import smoothing_window

# Eight seeds of the default model gave 0.09 to 0.17 % (docs/lab/loss_gap.md).
NORMAL_GAP = 0.002

if TYPE_CHECKING:
    from rich.console import Console

    from .trainer import Trainer


class _ConsoleHandler(logging.Handler):
    """Log lines between those of progress."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record))


def log_to(console: Console) -> None:
    """The log of this package goes to the console that has the lines of progress."""
    logger = logging.getLogger("sonicmoe")
    # A stderr that cannot be written must not end a run, and the console is one that bears it.
    logger.handlers = [_ConsoleHandler(console)]
    logger.setLevel(logging.INFO)
    # Paddle gives the root logger a handler of its own, at INFO.
    logger.propagate = False
    logging.getLogger("matplotlib").setLevel(logging.WARNING)


def announce(trainer: Trainer, resume: bool, console: Console) -> None:
    """Print what runs, on which text, and where the results go."""
    from .trainer import FULL_PRECISION, MAIN

    config, corpus, learner = trainer.config, trainer.corpus, trainer.learners[MAIN]
    model, twin = config.model, trainer.learners.get(FULL_PRECISION)
    beside = f", compared with {config.against} on engine {twin.engine}" if twin else ""
    ranks = trainer.ranks.layout.world_size
    megabytes = (len(corpus.train) + len(corpus.held_out)) / 1e6
    console.print(
        f"{config.framework} on {learner.device}, {ranks} rank{'s' if ranks > 1 else ''}, experts in "
        f"{config.precision} on engine {learner.engine}{beside}: {model.parameters / 1e6:.2f} M "
        f"parameters, {model.num_layers} layers ({len(model.moe_layers)} MoE), {model.num_experts} "
        f"experts, top-{model.topk}\n"
        f"text: {corpus.num_files} files, {megabytes:.1f} MB; results in {trainer.directory}"
    )
    if resume:
        console.print(f"resuming after step {trainer.step}")


def draw(trainer: Trainer, console: Console) -> Path | None:
    """Draw the plot and return its path; without matplotlib say so and return None."""
    config = trainer.config
    path, label = trainer.directory / "loss.png", f"{config.precision} ({config.framework})"
    try:
        plot_loss(trainer.records, path, label, config.against or "full precision")
    except PlotsUnavailableError as error:
        console.print(str(error))
        return None
    return path


def plot_loss(records: Sequence[StepRecord], path: Path, label: str, twin: str) -> None:
    """Loss of the run and, where recorded, of its full-precision `twin`, with the difference of the
    smoothed curves below. PlotsUnavailableError without matplotlib.
    """
    steps, losses = [record.step for record in records], [record.loss for record in records]
    references = compared_losses(records)[1]
    # The gap has an axis of its own: on that of the losses it would be a flat line.
    ratios = [3, 1] if references else [1]
    figure = new_figure((8, 6.5 if references else 5))
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    axes[0].plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    # Each mean stands in the middle of its steps. At the last of them the curve would lag.
    middles = smoothed(steps)
    label = f"{label}, mean of {smoothing_window(len(steps))} steps"
    axes[0].plot(middles, smoothed(losses), color="tab:blue", label=label)
    if references:
        axes[0].plot(middles, smoothed(references), color="tab:orange", linestyle="--", label=twin)
        axes[1].plot(middles, 100 * (smoothed(losses) / smoothed(references) - 1), color="tab:red")
        axes[1].axhline(0, color="black", linewidth=0.6)
        axes[1].set_ylabel("smoothed gap, %")
    axes[0].set(ylabel="cross entropy, nats per byte", title="Training loss")
    axes[0].legend()
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def report(directory: Path, summary: dict[str, Any], as_json: bool) -> None:
    """Write `summary.json`, and print the summary to stdout."""
    from .run_directory import SUMMARY_NAME

    text = json.dumps(summary, indent=2)
    # A reader takes a run with a summary for a finished one.
    write_whole(directory / SUMMARY_NAME, text + "\n")
    if as_json:
        click.echo(text)
        return
    for label, value in _summary_lines(summary):
        click.echo(f"{label:<24}{value}")


def _summary_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and value of what there is: a run may have no twin and no tokens."""
    forms = {
        "steps": ("steps", "d"),
        "loss_start": ("loss at start", ".4f"),
        "loss_end": ("loss at end", ".4f"),
        "held_out_loss": ("held-out loss", ".4f"),
        "seconds_per_step": ("seconds per step", ".4f"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "load_imbalance": ("busiest expert", ".2f"),
    }
    yield "engine", f"{summary['precision']} on {summary['engine_used']}"
    for name, (label, form) in forms.items():
        if summary[name] is not None:
            twin = summary.get(f"{name}_full_precision")
            beside = f"  (full precision {format(twin, form)})" if twin else ""
            yield label, format(summary[name], form) + beside
    if (gap := summary["loss_gap"]) is not None:
        normal = f"up to {NORMAL_GAP:.1%} of the default model"
        judged = (
            f"normal: {normal}" if gap <= NORMAL_GAP else f"normal is {normal}; try other seeds"
        )
        baseline = f"{summary['against']} on {summary['engine_full_precision']}"
        yield "gap to full precision", f"{100 * gap:.3f} %  ({judged}; beside {baseline})"
    for name in ("plot", "metrics", "checkpoint"):
        if summary[name] is not None:
            yield name, summary[name]
    yield from (("captured tensors", path) for path in summary["captured"])
