"""The training loop: framework-neutral, deterministic, interruptible between any two steps.

A run and, on request, its full-precision twin step side by side on the same batches from the same
initial weights.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sonicmoe.errors import SonicMoEError, expect
from sonicmoe.frameworks import load

from .checkpoint import SavedRun, load_checkpoint, save_checkpoint
from .corpus import Corpus
from .metrics import (
    StepRecord,
    StepResult,
    append_metrics,
    begin_metrics,
    compared_losses,
    loss_gap,
    read_metrics,
)
from .model_config import RunConfig, smoothing_window
from .ranks import Ranks

if TYPE_CHECKING:
    from .decoder_learner import DecoderLearner

CHECKPOINT_NAME = "checkpoint.npz"
METRICS_NAME = "metrics.jsonl"
CAPTURED_PATTERN = "captured-step*-layer*.npz"
MAIN, FULL_PRECISION = "main", "full_precision"


class TrainingError(SonicMoEError, ArithmeticError):
    """Training cannot go on: the loss is not finite."""


@dataclass(eq=False)
class Trainer:
    """One run in one directory. Build it with `start` or `resume`, then call `train`.

    Under several ranks every rank has a trainer and makes the same calls; rank 0 alone writes
    files.

    Attributes:
        step: optimizer steps done.
        records: the records of the metrics file.
    """

    config: RunConfig
    corpus: Corpus
    directory: Path
    learners: dict[str, DecoderLearner]
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    records: list[StepRecord] = field(default_factory=list)

    @classmethod
    def start(
        cls, config: RunConfig, corpus: Corpus, directory: Path, ranks: Ranks | None = None
    ) -> Trainer:
        """A run at step 0. Errors as `RunConfig.require_startable`, `Corpus.require_length` and
        `backend`.
        """
        ranks = ranks or Ranks()
        config.require_startable(ranks.layout.world_size)
        corpus.require_length(config.model.seq_len)
        config, learners = _make_learners(config, ranks)
        return cls(config, corpus, directory, learners, ranks)

    @classmethod
    def resume(
        cls, config: RunConfig, corpus: Corpus, directory: Path, ranks: Ranks | None = None
    ) -> Trainer:
        """Continue from the checkpoint in `directory`; with an unchanged `config` and text, bit for
        bit as if never stopped.

        Any number of ranks may continue a run of any other number. The sums of gradients are then
        rounded in another order. CheckpointError where there is no checkpoint, a damaged one, or one
        of another model, framework or precision.
        """
        # Before a model is built, so that a run that cannot be resumed is refused at once.
        saved, arrays = load_checkpoint(directory / CHECKPOINT_NAME)
        saved.require_resumable(config)
        # A resumed run keeps the twin that it had. Without this, another machine could choose
        # another baseline in the middle of the curve.
        config = replace(config, against=config.against or saved.config.against)
        # `start` loads initial weights, which the checkpoint then overwrites whole.
        trainer = cls.start(config, corpus, directory, ranks)
        for name, learner in trainer.learners.items():
            # `save` puts the learner's name before those of its arrays.
            own = [key for key in arrays if key.startswith(f"{name}/")]
            learner.load_state({key.removeprefix(f"{name}/"): arrays[key] for key in own})
        trainer.step = saved.step
        # The metrics may be ahead of the checkpoint, because they are written after every step.
        # Those later steps are done again, so their records are left out.
        trainer.records = read_metrics(directory / METRICS_NAME, up_to_step=trainer.step)
        return trainer

    def train(
        self,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train up to `config.train.steps`; True when all steps are done, False when `should_stop`
        asked to end earlier.

        A checkpoint is written every `checkpoint_every` steps (0: never in between) and at the end,
        however it comes about. The last step saves the tensors of `capture_layers`.

        Raises:
            TrainingError: the loss is not finite; the last good checkpoint stays.
            DumpError: tensors are to be captured, and their files cannot be written.
        """
        train = self.config.train
        # A signal reaches ranks at different steps. They agree before every step, so that all stop
        # after the same one.
        agreed, metrics = self.ranks.largest, self.directory / METRICS_NAME
        if self.writes:
            begin_metrics(metrics, self.records)
        while self.step < train.steps and not agreed(should_stop()):
            if self.step + 1 == train.steps:
                self._capture_next_step()
            record = self._advance()
            self.records.append(record)
            if self.writes:
                append_metrics(metrics, record)
            on_step(record)
            due = train.checkpoint_every and self.step % train.checkpoint_every == 0
            # The last step's checkpoint is written below in any case, so it is not written twice.
            if due and self.step < train.steps:
                self.save()
        self.save()
        return self.step >= train.steps

    @property
    def writes(self) -> bool:
        """Whether this rank writes the files."""
        return self.ranks.layout.rank == 0

    def save(self) -> None:
        """Write the checkpoint of this moment; every rank calls it, rank 0 writes when it has
        everything.
        """
        # Gathering the experts is a collective, so every rank takes part before those that write
        # nothing return.
        arrays = {
            f"{name}/{key}": array
            for name, learner in self.learners.items()
            for key, array in learner.state().items()
        }
        if not self.writes:
            return
        saved = SavedRun(self.step, self.config, self.corpus.sha256, self.corpus.paths)
        save_checkpoint(self.directory / CHECKPOINT_NAME, saved, arrays)

    def captured(self) -> dict[int, Path]:
        """By MoE layer of `capture_layers` the file that the last step's tensors go to."""
        stem = f"captured-step{self.config.train.steps}-layer"
        return {n: self.directory / f"{stem}{n}.npz" for n in self.config.capture_layers}

    def _capture_next_step(self) -> None:
        """Under expert parallelism the experts of rank 0, which alone writes files."""
        for layer, path in self.captured().items() if self.writes else ():
            # A file that is there afterwards is then this step's.
            path.unlink(missing_ok=True)
            self.learners[MAIN].dump_next_step(layer, path)

    def evaluate(self) -> dict[str, float]:
        """Mean held-out loss by learner; empty when `eval_batches` is 0."""
        train, length = self.config.train, self.config.model.seq_len
        batches = [
            self.corpus.held_out_batch(i, train.batch_size, length)
            for i in range(train.eval_batches)
        ]
        if not batches:
            return {}
        return {
            name: float(np.mean([learner.evaluate(b) for b in batches]))
            for name, learner in self.learners.items()
        }

    def summary(self) -> dict[str, Any]:
        """Final figures of at least one step, plain values; every rank calls it.

        Losses at the end and `load_imbalance` are means over the last steps, times are medians.
        `loss_gap` is a fraction (see `metrics.loss_gap`). Figures of the twin are None without one.
        `engine_used` is the one that ran.
        """
        config, records = self.config, self.records
        main, twin = self.learners[MAIN], self.learners.get(FULL_PRECISION)
        # Evaluation is a collective, which is why every rank calls `summary`.
        held_out = self.evaluate()
        last, compared = records[-smoothing_window(len(records)) :], compared_losses(records)
        return {
            "config": config.to_json(),
            "engine_used": main.engine,
            "engine_full_precision": twin.engine if twin else None,
            "device": main.device,
            "parameters": config.model.parameters,
            "ranks": self.ranks.layout.world_size,
            "steps": self.step,
            "loss_start": records[0].loss if records else None,
            "loss_end": _over(np.mean, last, "loss"),
            "loss_end_full_precision": _over(np.mean, last, "full_precision_loss"),
            "held_out_loss": held_out.get(MAIN),
            "held_out_loss_full_precision": held_out.get(FULL_PRECISION),
            "loss_gap": loss_gap(*compared) if compared[0] else None,
            "tokens_per_s": _over(np.median, records, "tokens_per_s"),
            "seconds_per_step": _over(np.median, records, "seconds"),
            "seconds_per_step_full_precision": _over(np.median, records, "full_precision_seconds"),
            "load_imbalance": _over(np.mean, last, "load_imbalance"),
        }

    def _advance(self) -> StepRecord:
        train, step = self.config.train, self.step + 1
        # The whole batch on every rank, the same bits: a batch is a function of seed and step. Each
        # learner takes its rank's part.
        tokens = self.corpus.batch(step, train.batch_size, self.config.model.seq_len, train.seed)
        rate = train.learning_rate(step)
        done = {
            name: _timed_step(learner, tokens, rate, f"step {step} of the {name} run")
            for name, learner in self.learners.items()
        }
        # Only now, so that a checkpoint never claims a step whose loss was not finite.
        self.step = step
        result, seconds = done[MAIN]
        twin, twin_seconds = done.get(FULL_PRECISION, (None, None))
        figures = result._asdict()
        counts = figures.pop("expert_counts")
        return StepRecord(
            step=step,
            learning_rate=rate,
            tokens_per_s=train.batch_size * self.config.model.seq_len / seconds,
            seconds=seconds,
            expert_load=(counts / counts.sum(1, keepdims=True)).tolist(),
            full_precision_loss=None if twin is None else twin.loss,
            full_precision_seconds=twin_seconds,
            **figures,
        )


def backend(framework: str) -> Any:
    """The module with `Learner(model, train, precision, engine, ranks)`, a model and its optimizer that
    start from the `initial_weight`s of `train.seed`, and `JoinedRanks(layout, max_tokens)`, the ranks
    of a launcher, which dispatch at most `max_tokens` at once.

    Errors as `sonicmoe.frameworks.load`. A learner raises EngineUnavailableError, ConfigError or
    ShapeError where the engine cannot run here, or not at these sizes.
    """
    # Imports no framework before: for Paddle, `load` switches its torch proxy on for `sonicmoe`.
    load(framework)
    return importlib.import_module(f"ernie_compat.{framework}_backend")


def baseline_for(engine: str) -> str:
    """The precision of the twin of a run whose experts are on `engine`: bf16 beside the FP8 kernels
    of a GPU, else fp32.
    """
    return "bf16" if engine == "hopper" else "fp32"


def _make_learners(config: RunConfig, ranks: Ranks) -> tuple[RunConfig, dict[str, DecoderLearner]]:
    """The learners, and the configuration with its baseline decided."""

    def make(precision: str, engine: str) -> DecoderLearner:
        learner = backend(config.framework).Learner
        made: DecoderLearner = learner(config.model, config.train, precision, engine, ranks)
        return made

    # The main learner first: "auto" is resolved by building it, and the baseline depends on the
    # engine that runs.
    main = make(config.precision, config.engine)
    if not config.compare:
        return config, {MAIN: main}
    against = config.against or baseline_for(main.engine)
    # By name, so that nothing else can step in. Only the reference engine computes in fp32.
    engine = "bf16" if against == "bf16" and main.engine != "reference" else "reference"
    return replace(config, against=against), {MAIN: main, FULL_PRECISION: make(against, engine)}


def _timed_step(
    learner: DecoderLearner, tokens: np.ndarray, learning_rate: float, name: str
) -> tuple[StepResult, float]:
    """The step and its seconds. TrainingError where its figures are not finite."""
    # `train_step` returns numbers on the host, so the device has finished when the clock is read
    # again.
    started = time.perf_counter()
    result = learner.train_step(tokens, learning_rate)
    finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    words = f"{name}: loss {result.loss}, gradient norm {result.grad_norm}"
    way_out = "the last checkpoint is whole: resume from it with a lower learning rate"
    expect(finite, TrainingError, f"{words}; {way_out}")
    return result, time.perf_counter() - started


def _over(statistic: Callable[..., Any], records: list[StepRecord], name: str) -> float | None:
    """`statistic` of a figure of the records; None where there are none, or it was not recorded."""
    values = [getattr(record, name) for record in records]
    return float(statistic(values)) if values and None not in values else None
