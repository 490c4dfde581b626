"""The directory of a run, in which nothing is lost by accident, and what `sonicmoe train` says of a run
at its beginning and at its end.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sonicmoe.errors import ConfigError, expect

from .metrics import write_whole
from .trainer import CAPTURED_PATTERN, CHECKPOINT_NAME, FULL_PRECISION, MAIN, METRICS_NAME, Trainer

SUMMARY_NAME = "summary.json"
# What a run leaves beside captured tensors, and so what --overwrite removes.
RUN_FILES = CHECKPOINT_NAME, METRICS_NAME, SUMMARY_NAME


if TYPE_CHECKING:
    from rich.console import Console


def open_directory(out: Path | None, may_hold_a_run: bool) -> Path:
    """The directory of the results, `out` or a new one named by the time. ConfigError where it cannot
    be made or written, or holds a run that would be lost.
    """
    # Two runs may start in one second.
    directory = out or Path("runs", time.strftime(f"train-%Y%m%d-%H%M%S-{os.getpid()}"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be a directory: {error.strerror}") from None
    expect(os.access(directory, os.W_OK), ConfigError, f"--out {directory} is not writable")
    # A link that points nowhere counts too: its owner may bring the disk back.
    held = any(os.path.lexists(directory / name) for name in RUN_FILES)
    keeps = "--resume continues it, --overwrite replaces it, another --out keeps it"
    expect(may_hold_a_run or not held, ConfigError, f"--out {directory} holds a run; {keeps}")
    return directory


def clear(directory: Path) -> None:
    """Remove a run's files, and nothing else. ConfigError where one cannot be removed."""
    try:
        for path in (*(directory / name for name in RUN_FILES), *directory.glob(CAPTURED_PATTERN)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--overwrite cannot remove {error.filename}: {error.strerror}") from None


def log_to(console: Console) -> None:
    """The log of this package goes to the console that has the lines of progress."""
    logger, handler = logging.getLogger("sonicmoe"), logging.Handler()
    # A stderr that cannot be written must not end a run, and the console is one that bears it.
    handler.emit = lambda record: console.print(handler.format(record))  # type: ignore[method-assign]
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    # Paddle gives the root logger a handler of its own, at INFO.
    logger.propagate = False


def announce(trainer: Trainer, resume: bool, console: Console) -> None:
    """Print what runs, on which text, and where the results go."""
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


def report(directory: Path, summary: dict[str, Any], as_json: bool) -> None:
    """Write `summary.json`, and print the summary to stdout."""
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
    config = summary["config"]
    yield "engine", f"{config['precision']} on {summary['engine_used']}"
    for name, (label, form) in forms.items():
        if summary[name] is not None:
            twin = summary.get(f"{name}_full_precision")
            beside = f"  (full precision {format(twin, form)})" if twin else ""
            yield label, format(summary[name], form) + beside
    if (gap := summary["loss_gap"]) is not None:
        baseline = f"{config['against']} on {summary['engine_full_precision']}"
        yield "gap to full precision", f"{100 * gap:.3f} %  (beside {baseline})"
    yield from (("captured tensors", path) for path in summary["captured"])
