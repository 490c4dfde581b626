"""What `sonicmoe train` says about a run at its beginning and at its end."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sonicmoe.errors import writing

from .model_config import smoothing_window

# Eight seeds of the default model gave 0.09 to 0.17 % (docs/lab/loss_gap.md).
NORMAL_GAP = 0.002

if TYPE_CHECKING:
    from rich.console import Console

    from .parallel import Parallel
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
    from .saved_run import SavedRun
    from .trainer import CHECKPOINT_NAME, MAIN

    config, corpus, learner = trainer.config, trainer.corpus, trainer.learners[MAIN]
    model = config.model
    console.print(
        f"{config.framework} on {learner.device}, experts in {config.precision} on engine {learner.engine}"
        f"{_baseline(trainer)}{_ranks(trainer.parallel)}: {learner.num_parameters / 1e6:.2f} M parameters, "
        f"{model.num_layers} layers ({len(model.moe_layers)} MoE), {model.num_experts} experts, top-{model.topk}\n"
        f"text: {corpus.num_files} files, {(len(corpus.train) + len(corpus.held_out)) / 1e6:.1f} MB; results in {trainer.directory}"
        f"{'' if config.train.checkpoint else ', without a checkpoint'}"
    )
    if resume:
        console.print(f"resuming after step {trainer.step}")
        # Allowed, for continued training on another text; but it may also be a wrong path.
        if SavedRun.read(trainer.directory / CHECKPOINT_NAME).text_sha256 != corpus.sha256:
            console.print(
                "warning: the text differs from the checkpoint's; without --data the run continues on its own"
            )


def _baseline(trainer: Trainer) -> str:
    from .trainer import FULL_PRECISION

    twin = trainer.learners.get(FULL_PRECISION)
    against = trainer.config.against
    return "" if twin is None else f", compared with {against} on engine {twin.engine}"


def _ranks(parallel: Parallel) -> str:
    layout = parallel.layout
    if layout.world_size == 1:
        return ""
    return f", {layout.world_size} ranks ({layout.ep_size} expert-parallel x {layout.world_size // layout.ep_size} data-parallel)"


def draw(trainer: Trainer, console: Console) -> dict[str, str]:
    """Draw the plot and return its path by name; without matplotlib say so and return none."""
    from sonicmoe.plotting import PlotsUnavailableError

    from .plots import plot_loss

    if not trainer.records:  # a run that was resumed at its last step
        return {}
    path = trainer.directory / "loss.png"
    try:
        label = f"{trainer.config.precision} ({trainer.config.framework})"
        plot_loss(trainer.records, path, label, trainer.config.against or "full precision")
    except PlotsUnavailableError as error:
        console.print(str(error))
        return {}
    return {"loss": str(path)}


def report(
    trainer: Trainer,
    summary: dict[str, Any],
    plots: Mapping[str, str],
    captured: Sequence[Path],
    as_json: bool,
) -> None:
    """Write `summary.json`, and print the summary to stdout."""
    from .checkpoint import partial_of
    from .run_directory import SUMMARY_NAME
    from .trainer import CHECKPOINT_NAME, METRICS_NAME

    checkpoint = str(trainer.directory / CHECKPOINT_NAME)
    files = {
        "metrics": str(trainer.directory / METRICS_NAME),
        "checkpoint": checkpoint if trainer.config.train.checkpoint else None,
        "captured": [str(path) for path in captured],
    }
    summary |= {"plots": dict(plots), **files}
    path = trainer.directory / SUMMARY_NAME
    # Renamed into place, because a reader takes a run with a whole summary for a finished one.
    partial = partial_of(path)
    with writing(path):
        partial.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(partial, path)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    # A line without a value has nothing to say for this run: no twin, no tokens, no checkpoint.
    told = [(label, value) for label, value in _summary_lines(summary) if value is not None]
    click.echo("\n".join(f"{label:<24}{value}" for label, value in told))


def _summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    def figure(name: str, form: str, suffix: str = "") -> str | None:
        return None if summary[name] is None else format(summary[name], form) + suffix

    def beside(name: str, form: str) -> str:
        reference = figure(f"{name}_full_precision", form)
        return f"  (full precision {reference})" if reference else ""

    gap = None if summary["loss_gap"] is None else f"{100 * summary['loss_gap']:.3f} %"
    twin = summary["engine_full_precision"]
    baseline = f"  (full precision: {summary['against']} on {twin})" if twin else ""
    return [
        ("engine", f"{summary['precision']} on {summary['engine_used']}{baseline}"),
        ("steps", str(summary["steps"])),
        ("loss at start", figure("loss_start", ".4f")),
        ("loss at end", figure("loss_end", ".4f", _last(smoothing_window(summary["steps"])))),
        ("held-out loss", figure("held_out_loss", ".4f", beside("held_out_loss", ".4f"))),
        ("gap to full precision", gap and f"{gap}  ({_judged(summary['loss_gap'])})"),
        ("seconds per step", figure("seconds_per_step", ".4f", beside("seconds_per_step", ".4f"))),
        ("tokens/s", figure("tokens_per_s", ",.0f")),
        ("busiest expert", figure("load_imbalance", ".2f", " x the mean load")),
        *((f"plot: {name}", path) for name, path in summary["plots"].items()),
        ("metrics", summary["metrics"]),
        ("checkpoint", summary["checkpoint"]),
        *(("captured tensors", path) for path in summary["captured"]),
    ]


def _judged(gap: float) -> str:
    if gap <= NORMAL_GAP:
        return f"normal: up to {NORMAL_GAP:.1%} of the default model"
    return f"more than the {NORMAL_GAP:.1%} of the default model; try other seeds"


def _last(window: int) -> str:
    return f"  (mean of the last {window} steps)" if window > 1 else "  (of the last step)"
