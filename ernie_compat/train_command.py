"""`sonicmoe train`: the main job, a small ERNIE-style MoE decoder trained on text, every expert on
the node.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from sonicmoe.cli.options import AUTO_HELP, CHOICES, choice_line
from sonicmoe.cli.refusals import Location, OneLineCommand, drop_unwritable
from sonicmoe.cli.screen import Activity, progress_console, say_duration
from sonicmoe.config import current_config
from sonicmoe.enums import EngineName
from sonicmoe.errors import ConfigError, RankLostError, SonicMoEError, expect
from sonicmoe.frameworks import AUTO, FrameworkChoice, choose

from .checkpoint import SavedRun, read_header
from .corpus import load_corpus
from .model_config import PRECISIONS, ModelConfig, RunConfig, TrainConfig
from .progress import InterruptGuard, TrainingDisplay
from .ranks import LAUNCHERS, Ranks, lost_ranks_named, read_launch
from .run_report import announce, clear, log_to, open_directory, report
from .trainer import CHECKPOINT_NAME, Trainer, backend

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_SIGNAL_BASE = 1, 2, 128
CONFIGURATIONS = (ModelConfig, TrainConfig, RunConfig)  # no two of them share a name
DEFAULTS = {one.name: one.default for config in CONFIGURATIONS for one in fields(config)}
COMPARE_HELP = (
    "Train the same seed in full precision beside it (bf16 where the experts run on engine hopper, "
    "else fp32), on the same batches, and report the loss gap: the mean of |s - r| / r over the last "
    "quarter of the steps, s and r being the two losses, smoothed."
)


# An option, the field that it sets, and its help.
FIELD_OPTIONS = (
    ("--steps", "steps", "Optimizer steps."),
    ("--batch", "batch_size", "Sequences per optimizer step."),
    ("--micro-batches", "micro_batches", "Parts of a batch, over which gradients accumulate."),
    ("--seq-len", "seq_len", "Bytes per sequence."),
    ("--hidden", "hidden_size", "Hidden size."),
    ("--layers", "num_layers", "Decoder layers; the first is dense."),
    ("--heads", "num_heads", "Attention heads."),
    ("--experts", "num_experts", "Experts per MoE layer."),
    ("--topk", "topk", "Experts per token."),
    ("--intermediate", "intermediate_size", "Intermediate size of an expert."),
    ("--lr", "lr", "Peak learning rate (warm-up, then cosine)."),
    ("--seed", "seed", "Decides initial weights and batches."),
    ("--checkpoint-every", "checkpoint_every", "Steps between checkpoints; 0: only at the end."),
)


def _field_options(command: Any) -> Any:
    """Add `FIELD_OPTIONS` to a command."""
    for name, field, text in reversed(FIELD_OPTIONS):
        default, shown = DEFAULTS[field], f"{text}  [default: {DEFAULTS[field]}]"
        # The value stays None when not given: a resumed run then takes it from its checkpoint.
        command = click.option(name, field, type=type(default), default=None, help=shown)(command)
    return command


@click.command("train", cls=OneLineCommand)
@click.argument("more_data", nargs=-1, type=Location(), metavar="[PATH]...")
@click.option("--data", multiple=True, type=Location(), metavar="PATH...",
              help="Text to train on, byte by byte: files or directories; may be repeated.  "
              "[default: this Python's standard-library sources; with --resume, the text of the checkpoint]")  # fmt: skip
@click.option("--framework", type=click.Choice(CHOICES), default=None,
              help=f"Framework of model and optimizer. {AUTO_HELP}  [default: auto]")  # fmt: skip
@click.option("--engine", type=click.Choice([name.value for name in EngineName]), default=None,
              help="Engine of the expert MLPs.  [default: SONIC_MOE_ENGINE, else auto]")  # fmt: skip
@click.option("--precision", type=click.Choice(PRECISIONS), default=None,
              help=f"Arithmetic of the expert MLPs.  [default: {RunConfig.precision}]")  # fmt: skip
@click.option("--compare/--no-compare", default=None, help=COMPARE_HELP)
@_field_options
@click.option("--capture", "capture_layers", type=int, multiple=True, metavar="LAYER",
              help="In the last step, save the inputs and gradients of the experts of MoE layer LAYER (the first layer is 0) to "
              "captured-step<N>-layer<LAYER>.npz in --out, for `sonicmoe bisect`: those of the first micro-batch, on rank 0. "
              "May be repeated.")  # fmt: skip
@click.option("--out", type=Location(), default=None, metavar="DIR",
              help="Directory of checkpoint and metrics, for one run at a time.  "
              "[default: a new one, runs/train-<date>-<time>]")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Continue the run in --out from its checkpoint; options not given keep their saved values.")  # fmt: skip
@click.option("--overwrite", is_flag=True,
              help="Replace the run that --out holds. Without it, or --resume, a directory that holds a run is refused.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the final summary as JSON on stdout.")
def train(
    more_data: tuple[Path, ...], data: tuple[Path, ...], out: Path | None, resume: bool,
    overwrite: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Train a small ERNIE-style Mixture-of-Experts language model on text, its experts on
    SonicMoEMlpNode.

    Progress goes to stderr, the summary to stdout; metrics.jsonl and checkpoint.npz to
    --out. Ctrl-C, SIGTERM and a lost terminal save a checkpoint and exit with 130, 143 and 129. Bad
    input is one line and exit code 2.

    Several ranks share the experts and split the batch: torchrun --nproc-per-node 4 -m sonicmoe train
    --framework torch, or python -m paddle.distributed.launch --nproc_per_node 4 "$(command -v
    sonicmoe)" train --framework paddle. A checkpoint of any number of ranks resumes on any other.
    """
    # What was typed: click has None for an option that was not, and () for one that may be repeated.
    given = {name: value for name, value in options.items() if value not in (None, ())}
    try:
        code = _run([*data, *more_data], out, resume, overwrite, as_json, given)
    except KeyboardInterrupt:
        words = "interrupted; no checkpoint was written since the last one"
        _fail(words, EXIT_SIGNAL_BASE + 2)
    except (SonicMoEError, OSError) as error:
        # Numbers that are not finite, ranks that are gone and full disks end a run that was well
        # asked for.
        failed = isinstance(error, ArithmeticError | RankLostError | OSError)
        _fail(str(error), EXIT_FAILED if failed else EXIT_BAD_INPUT)
    drop_unwritable()
    sys.exit(code)


def _run(
    data: list[Path], out: Path | None, resume: bool, overwrite: bool, as_json: bool,
    given: Mapping[str, Any],
) -> int:  # fmt: skip
    # Everything that can be refused is refused before ranks join: a rank that ends inside a
    # collective leaves the others waiting.
    layout = read_launch()
    console = progress_console(quiet=layout.rank != 0)
    log_to(console)
    needs = "--resume needs --out DIR, the directory of the run to continue, and no --overwrite"
    expect(not resume or (out is not None and not overwrite), ConfigError, needs)
    saved = None
    # The checkpoint is read before the options are completed: it has the values of those not given.
    if out is not None and resume:
        saved = read_header(out / CHECKPOINT_NAME)
    # A resumed run stays with the framework of its checkpoint.
    choice = None if saved is not None else choose(given.get("framework"))
    config = _configuration(given, saved, choice)
    with Activity("reading the text", console):
        corpus = load_corpus(data) if data or saved is None else saved.text()
    config.require_startable(layout.world_size)
    corpus.require_length(config.model.seq_len)
    directory = out or Path()
    # The others compute with rank 0 and write nothing; the directory may be on another host.
    if layout.rank == 0:
        directory = open_directory(out, resume or overwrite)
    with lost_ranks_named(layout, config.framework):
        # The ranks join here: from now on one that ends leaves the others waiting for it. An
        # evaluation batch is not cut into micro-batches, so a whole batch is the most tokens.
        tokens = config.train.batch_size * config.model.seq_len // layout.world_size
        several = layout.world_size > 1
        ranks = backend(config.framework).JoinedRanks(layout, tokens) if several else Ranks()
        with Activity(f"importing {config.framework} and building the model", console):
            start = Trainer.resume if resume else Trainer.start
            trainer = start(config, corpus, directory, ranks)
        # Not before the learners stand: an engine that is refused must cost no run.
        if overwrite and trainer.writes:
            clear(directory)
        if choice is not None and (line := choice_line(choice)) is not None:
            console.print(line)
        code = _train(trainer, console, resume, as_json)
        ranks.close()
    return code


def _train(trainer: Trainer, console: Console, resume: bool, as_json: bool) -> int:
    if trainer.writes:
        announce(trainer, resume, console)
    # Signals become requests here only: before training there is nothing to save, and after it
    # Ctrl-C should end the process.
    started, directory = time.monotonic(), trainer.directory
    display = TrainingDisplay(console, trainer.config.train.steps)
    with InterruptGuard(console) as guard:
        finished = trainer.train(display.update, lambda: guard.received != 0)
        say_duration("training", started, console)
        if not finished:
            saved = f"checkpoint saved. Continue with: --resume --out {directory}"
            console.print(f"interrupted at step {trainer.step}; {saved}")
            # Ranks may have received different signals, or none; they agree on one exit code.
            return EXIT_SIGNAL_BASE + trainer.ranks.largest(guard.received)
    summary = trainer.summary()
    if not trainer.writes:
        return 0
    captured = [path for path in trainer.captured().values() if path.exists()]
    for path in trainer.captured().values():
        if path not in captured:
            console.print(f"the last step's tensors are not in {path}")
    report(directory, {**summary, "captured": [str(path) for path in captured]}, as_json)
    return EXIT_FAILED if len(captured) < len(trainer.config.capture_layers) else 0


def _configuration(
    given: Mapping[str, Any], saved: SavedRun | None, choice: FrameworkChoice | None
) -> RunConfig:
    """Options over the checkpoint's configuration, or over the defaults and the chosen framework.

    `given` holds the options that were typed. Options without a value are None in click, so that a
    resumed run can tell "not given" from "the default, given". A resumed run keeps its engine,
    whatever the environment names.
    """
    given = {name: value for name, value in given.items() if value != AUTO or name == "engine"}
    if choice is not None:
        given = {**given, "framework": choice.name}
    # Of a resumed run the checkpoint has every value, and an option changes its one.
    base = RunConfig(engine=current_config().engine.value) if saved is None else saved.config
    # An option has the name of the field that it sets.
    model, training, run = (
        {one.name: given[one.name] for one in fields(part) if one.name in given}
        for part in (base.model, base.train, base)
    )
    base = replace(base, model=replace(base.model, **model), train=replace(base.train, **training))
    return replace(base, **run)


def _fail(message: str, code: int) -> NoReturn:
    several = any(size in os.environ for _, size, *_ in LAUNCHERS)
    with suppress(OSError):  # the exit code tells it, where stderr is full
        click.echo(f"sonicmoe train: {' '.join(message.split())}", err=True)
    drop_unwritable()
    if several:
        os._exit(code)  # communicators left in the middle of a collective may never be torn down
    sys.exit(code)


if __name__ == "__main__":
    train(prog_name="python -m ernie_compat.train_command")
