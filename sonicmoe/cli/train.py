"""`sonicmoe train`: the main job, a small ERNIE-style MoE decoder trained on text, every expert on
the node.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ernie_compat.model_config import (
    BASELINES,
    FRAMEWORKS,
    PRECISIONS,
    SMOOTHING_WINDOW,
    ModelConfig,
    RunConfig,
    TrainConfig,
)

from ..enums import EngineName
from ..errors import ConfigError, SonicMoEError, expect

if TYPE_CHECKING:
    from rich.console import Console

    from ernie_compat.corpus import Corpus
    from ernie_compat.parallel import Parallel
    from ernie_compat.trainer import Trainer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_SIGNAL_BASE = 1, 2, 128
MODEL_OPTIONS = {
    "seq_len": "seq_len",
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "experts": "num_experts",
    "topk": "topk",
    "intermediate": "intermediate_size",
}
TRAIN_OPTIONS = {
    "steps": "steps",
    "batch": "batch_size",
    "micro_batches": "micro_batches",
    "lr": "lr",
    "seed": "seed",
    "checkpoint_every": "checkpoint_every",
}
RUN_OPTIONS = ("framework", "precision", "engine", "compare", "against", "ep")
COMPARE_HELP = (
    "Train the same seed in full precision beside it, on the same batches, and report the loss gap: the mean of |s - r| / r over the last "
    f"quarter of the steps, s and r being the two losses, each averaged over the last {SMOOTHING_WINDOW} steps."
)


class OneLineErrors(click.Command):
    """A command whose usage errors are one line on stderr."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse; a usage error forgets its context, so that click prints the message without the
        usage block.
        """
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except click.UsageError as error:
            # click prints the usage block of the error's context, and only the message where there
            # is none.
            error.ctx = None
            raise


def _size_option(name: str, default: object, text: str, kind: type = int) -> Any:
    # The value stays None when not given: a resumed run then takes it from its checkpoint.
    return click.option(name, type=kind, default=None, help=f"{text}  [default: {default}]")


def _choice_option(name: str, choices: Sequence[str], default: str, text: str) -> Any:
    return click.option(
        name, type=click.Choice(choices), default=None, help=f"{text}  [default: {default}]"
    )


@click.command("train", cls=OneLineErrors)
@click.argument("more_data", nargs=-1, metavar="[PATH]...")
@click.option(
    "--data",
    multiple=True,
    metavar="PATH...",
    help="Text to train on, byte by byte: files or directories; may be repeated.  [default: this Python's standard-library sources]",
)
@_choice_option(
    "--framework",
    FRAMEWORKS,
    "paddle if installed, else torch",
    "Framework of model and optimizer.",
)
@_choice_option(
    "--engine", [name.value for name in EngineName], RunConfig.engine, "Engine of the expert MLPs."
)
@_choice_option("--precision", PRECISIONS, RunConfig.precision, "Arithmetic of the expert MLPs.")
@click.option("--compare/--no-compare", default=None, help=COMPARE_HELP)
@_choice_option(
    "--against",
    BASELINES,
    "bf16 where the experts run on engine hopper, else fp32",
    "The full precision of --compare, which it implies.",
)
@_size_option("--steps", TrainConfig.steps, "Optimizer steps.")
@_size_option("--batch", TrainConfig.batch_size, "Sequences per optimizer step.")
@_size_option(
    "--micro-batches",
    TrainConfig.micro_batches,
    "Parts a batch is split into; gradients accumulate over them.",
)
@_size_option("--seq-len", ModelConfig.seq_len, "Bytes per sequence.")
@_size_option("--hidden", ModelConfig.hidden_size, "Hidden size.")
@_size_option("--layers", ModelConfig.num_layers, "Decoder layers; the first is dense.")
@_size_option("--heads", ModelConfig.num_heads, "Attention heads.")
@_size_option("--experts", ModelConfig.num_experts, "Experts per MoE layer.")
@_size_option("--topk", ModelConfig.topk, "Experts per token.")
@_size_option("--intermediate", ModelConfig.intermediate_size, "Intermediate size of an expert.")
@_size_option(
    "--ep",
    RunConfig.ep,
    "Ranks that share the experts (expert parallelism); under torchrun or paddle.distributed.launch, whose number of ranks must be "
    "a multiple of it. The batch is split over all ranks.",
)
@_size_option("--lr", TrainConfig.lr, "Peak learning rate (warm-up, then cosine).", float)
@_size_option("--seed", TrainConfig.seed, "Decides initial weights and batches.")
@_size_option(
    "--checkpoint-every",
    TrainConfig.checkpoint_every,
    "Steps between checkpoints; 0: only at the end.",
)
@click.option("--out", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Directory of checkpoint, metrics and plots.  [default: runs/train-<date>-<time>]")  # fmt: skip
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in --out from its checkpoint; options not given keep their saved values.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the final summary as JSON on stdout.")
def train(
    more_data: tuple[str, ...],
    data: tuple[str, ...],
    out: Path | None,
    resume: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a small ERNIE-style Mixture-of-Experts language model on text, its experts on
    SonicMoEMlpNode.

    Progress goes to stderr, the summary to stdout; metrics.jsonl, checkpoint.npz, loss.png and
    expert_load.png to --out. Ctrl-C saves a checkpoint and exits with 130. Bad input is one line
    and exit code 2.

    Several ranks: torchrun --nproc-per-node 4 -m sonicmoe train --framework torch --ep 4, or python
    -m paddle.distributed.launch --nproc_per_node 4 "$(command -v sonicmoe)" train --ep 4. A
    checkpoint of any number of ranks resumes on any other.
    """
    from ernie_compat.checkpoint import CheckpointError

    try:
        code = _run(
            [*data, *more_data],
            out,
            resume,
            as_json,
            {name: value for name, value in options.items() if value is not None},
        )
    except KeyboardInterrupt:
        _fail("interrupted; no checkpoint was written since the last one", EXIT_SIGNAL_BASE + 2)
    except SonicMoEError as error:
        # Every rank refuses the same input; one of them says so.
        said_by_rank_0 = isinstance(error, ConfigError | CheckpointError)
        _fail(
            str(error),
            EXIT_FAILED if isinstance(error, ArithmeticError) else EXIT_BAD_INPUT,
            said_by_rank_0,
        )
    except OSError as error:
        _fail(str(error), EXIT_FAILED)
    sys.exit(code)


def _run(
    data: list[str], out: Path | None, resume: bool, as_json: bool, given: Mapping[str, Any]
) -> int:
    from rich.console import Console

    from ernie_compat.corpus import load_corpus
    from ernie_compat.learner import make_parallel
    from ernie_compat.parallel import RankLayout, read_launch
    from ernie_compat.rank_guard import RankGuard
    from ernie_compat.trainer import CHECKPOINT_NAME

    # Everything that can be refused is refused before ranks join: a rank that ends inside a
    # collective leaves the others waiting.
    launch = read_launch()
    console = Console(stderr=True, highlight=False, markup=False, quiet=launch.rank != 0)
    _log_to(console)
    expect(
        out is not None or not resume,
        ConfigError,
        "--resume needs --out DIR, the directory of the run to continue",
    )
    directory = out if out is not None else Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    config = _configuration(given, directory / CHECKPOINT_NAME if resume else None)
    layout = RankLayout(launch, config.ep)
    config.require_world(layout.world_size)
    corpus = load_corpus(data)
    corpus.require_length(config.model.seq_len)
    if launch.rank == 0:
        _make_directory(directory)
    parallel = make_parallel(config.framework, layout, config.tokens_per_rank(layout.world_size))
    with RankGuard(parallel, lambda: _how_to_continue(directory / CHECKPOINT_NAME)):
        code = _train(config, corpus, directory, parallel, console, resume, as_json)
    parallel.close()
    return code


def _train(
    config: RunConfig,
    corpus: Corpus,
    directory: Path,
    parallel: Parallel,
    console: Console,
    resume: bool,
    as_json: bool,
) -> int:
    from ernie_compat.progress import InterruptGuard, TrainingDisplay
    from ernie_compat.trainer import CHECKPOINT_NAME, Trainer

    trainer = (Trainer.resume if resume else Trainer.start)(config, corpus, directory, parallel)
    if not resume and trainer.writes:
        _set_aside(directory / CHECKPOINT_NAME, console)
    if trainer.writes:
        _announce(trainer, resume, console)
    # Signals become requests here only: before training there is nothing to save, and after it
    # Ctrl-C should end the process.
    with InterruptGuard(console) as guard:
        with TrainingDisplay(console, config.train.steps, trainer.step) as display:
            finished = trainer.train(display.update, guard.requested)
        if not finished:
            hint = f"interrupted at step {trainer.step}; checkpoint saved. Continue with: --resume --out {directory}"
            console.print(hint, soft_wrap=True)
            # Ranks may have received different signals, or none; they agree on one exit code.
            return EXIT_SIGNAL_BASE + parallel.largest(guard.received)
    summary = trainer.summary()
    if trainer.writes:
        _report(trainer, summary, _draw(trainer, console), as_json)
    return 0


def _how_to_continue(checkpoint: Path) -> str:
    if not checkpoint.exists():
        return "there is no checkpoint yet"
    return f"the last checkpoint is whole, continue with: --resume --out {checkpoint.parent}"


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be a directory: {error.strerror}") from None
    expect(os.access(directory, os.W_OK), ConfigError, f"--out {directory} is not writable")


def _configuration(given: Mapping[str, Any], checkpoint: Path | None) -> RunConfig:
    """Options over the checkpoint's configuration, or over the defaults.

    `given` holds the options that were typed. Options without a value are None in click, so that a
    resumed run can tell "not given" from "the default, given".
    """
    from ernie_compat.checkpoint import read_header
    from ernie_compat.learner import default_framework

    if checkpoint is None:
        base = RunConfig(framework=given.get("framework") or default_framework())
    else:
        base = RunConfig.from_json(read_header(checkpoint).get("config", {}))
    model = {field: given[option] for option, field in MODEL_OPTIONS.items() if option in given}
    if "against" in given:
        expect(
            given.get("compare", True),
            ConfigError,
            "--against with --no-compare: there is nothing to compare with; needed: one of them",
        )
        # `given` comes last, so an explicit --compare stays what it is.
        given = {"compare": True, **given}
    training = {field: given[option] for option, field in TRAIN_OPTIONS.items() if option in given}
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, **model),
        train=dataclasses.replace(base.train, **training),
        **{name: given[name] for name in RUN_OPTIONS if name in given},
    )


def _set_aside(checkpoint: Path, console: Console) -> None:
    if checkpoint.exists():
        # Moved and not deleted: a forgotten --resume must not cost a long run.
        kept = checkpoint.with_name(f"{checkpoint.stem}.old{checkpoint.suffix}")
        os.replace(checkpoint, kept)
        console.print(
            f"starting anew; the earlier run's checkpoint is kept as {kept} (--resume would have continued it)",
            soft_wrap=True,
        )


def _announce(trainer: Trainer, resume: bool, console: Console) -> None:
    from ernie_compat.checkpoint import read_header
    from ernie_compat.trainer import CHECKPOINT_NAME, MAIN

    config, corpus, learner = trainer.config, trainer.corpus, trainer.learners[MAIN]
    model = config.model
    console.print(
        f"{config.framework} on {learner.device}, experts in {config.precision} on engine {learner.engine}"
        f"{_baseline(trainer)}{_ranks(trainer.parallel)}: {learner.num_parameters / 1e6:.2f} M parameters, "
        f"{model.num_layers} layers ({len(model.moe_layers)} MoE), {model.num_experts} experts, top-{model.topk}\n"
        f"text: {corpus.num_files} files, {(len(corpus.train) + len(corpus.held_out)) / 1e6:.1f} MB; results in {trainer.directory}",
        soft_wrap=True,
    )
    if resume:
        console.print(f"resuming after step {trainer.step}", soft_wrap=True)
        if read_header(trainer.directory / CHECKPOINT_NAME).get("text_sha256") != corpus.sha256:
            console.print(
                "warning: the text differs from the checkpoint's; give the same --data to continue the same run",
                soft_wrap=True,
            )


def _baseline(trainer: Trainer) -> str:
    from ernie_compat.trainer import FULL_PRECISION

    twin = trainer.learners.get(FULL_PRECISION)
    return (
        "" if twin is None else f", compared with {trainer.config.against} on engine {twin.engine}"
    )


def _ranks(parallel: Parallel) -> str:
    layout = parallel.layout
    if layout.world_size == 1:
        return ""
    return f", {layout.world_size} ranks ({layout.ep_size} expert-parallel x {layout.world_size // layout.ep_size} data-parallel)"


def _draw(trainer: Trainer, console: Console) -> dict[str, str]:
    """Draw both plots and return their paths by name; without matplotlib say so and return none."""
    from ernie_compat.plots import plot_expert_load, plot_loss

    from ..plotting import PlotsUnavailableError

    if not trainer.records:
        return {}
    paths = {name: trainer.directory / f"{name}.png" for name in ("loss", "expert_load")}
    try:
        label = f"{trainer.config.precision} ({trainer.config.framework})"
        plot_loss(trainer.records, paths["loss"], label, trainer.config.against or "full precision")
        plot_expert_load(trainer.records, paths["expert_load"])
    except PlotsUnavailableError as error:
        console.print(str(error), soft_wrap=True)
        return {}
    return {name: str(path) for name, path in paths.items()}


def _report(
    trainer: Trainer, summary: dict[str, Any], plots: Mapping[str, str], as_json: bool
) -> None:
    from ernie_compat.trainer import CHECKPOINT_NAME, METRICS_NAME

    files = {
        "metrics": str(trainer.directory / METRICS_NAME),
        "checkpoint": str(trainer.directory / CHECKPOINT_NAME),
    }
    summary |= {"plots": dict(plots), **files}
    (trainer.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(
        "\n".join(
            f"{label:<24}{value}" for label, value in _summary_lines(summary) if value is not None
        )
    )


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
        (
            "loss at end",
            figure("loss_end", ".4f", f"  (mean of the last {SMOOTHING_WINDOW} steps)"),
        ),
        ("held-out loss", figure("held_out_loss", ".4f", beside("held_out_loss", ".4f"))),
        ("gap to full precision", gap and f"{gap}  (smoothed loss, last quarter of the steps)"),
        ("seconds per step", figure("seconds_per_step", ".4f", beside("seconds_per_step", ".4f"))),
        ("tokens/s", figure("tokens_per_s", ",.0f")),
        ("busiest expert", figure("load_imbalance", ".2f", " x the mean load")),
        *((f"plot: {name}", path) for name, path in summary["plots"].items()),
        ("metrics", summary["metrics"]),
        ("checkpoint", summary["checkpoint"]),
    ]


class _ConsoleHandler(logging.Handler):
    """Log lines above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), soft_wrap=True)


def _log_to(console: Console) -> None:
    logger = logging.getLogger("sonicmoe")
    # The progress bar redraws its line, so a log line that went straight to stderr would break it.
    logger.handlers = [_ConsoleHandler(console)]
    logger.setLevel(logging.INFO)
    # Paddle gives the root logger a handler of its own, at INFO.
    logger.propagate = False
    logging.getLogger("matplotlib").setLevel(logging.WARNING)


def _fail(message: str, code: int, said_by_rank_0: bool = False) -> NoReturn:
    from ernie_compat.parallel import Launch, read_launch

    try:
        launch = read_launch()
    except ConfigError:  # perhaps the very error that is reported here
        launch = Launch()
    if launch.rank == 0 or not said_by_rank_0:
        place = f"rank {launch.rank}: " if launch.world_size > 1 and not said_by_rank_0 else ""
        click.echo(f"sonicmoe train: {place}{' '.join(message.split())}", err=True)
    if launch.world_size > 1:
        os._exit(code)  # communicators left in the middle of a collective may never be torn down
    sys.exit(code)


if __name__ == "__main__":
    train(prog_name="python -m sonicmoe.cli.train")
