"""The training loop: framework-neutral, deterministic, interruptible between any two steps.

A run and, on request, its full-precision twin step side by side on the same batches from the same
initial weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.errors import SonicMoEError, expect
from sonicmoe.log import logger
from sonicmoe.npz import NpzError, read_npz

from .checkpoint import load_checkpoint, require_finite_arrays, save_checkpoint
from .corpus import Corpus
from .learner import Learner, make_learner
from .memory import require_room
from .metrics import (
    MetricsFile,
    StepRecord,
    StepResult,
    continued_metrics,
    expert_load,
    load_imbalance,
    recorded_loss_gap,
)
from .model_config import RunConfig, smoothing_window
from .parallel import Parallel
from .saved_run import SavedRun

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
    learners: dict[str, Learner]
    parallel: Parallel = field(default_factory=Parallel)
    step: int = 0
    records: list[StepRecord] = field(default_factory=list)

    @classmethod
    def start(
        cls, config: RunConfig, corpus: Corpus, directory: Path, parallel: Parallel | None = None
    ) -> Trainer:
        """A run at step 0. CorpusError where the text is shorter than a sequence; else errors as
        `make_learner`.
        """
        parallel = parallel or Parallel()
        require_startable(config, corpus, parallel.layout.world_size)
        config, learners = _make_learners(config, parallel)
        return cls(config, corpus, directory, learners, parallel)

    @classmethod
    def resume(
        cls,
        config: RunConfig,
        corpus: Corpus,
        directory: Path,
        parallel: Parallel | None = None,
        allow_nonfinite: bool = False,
    ) -> Trainer:
        """Continue from the checkpoint in `directory`; with an unchanged `config` and text, bit for
        bit as if never stopped.

        Any number of ranks may continue a run of any other number. The sums of gradients are then
        rounded in another order.

        Raises:
            CheckpointError: no checkpoint, a damaged one, one of another model, framework or
                precision, or, unless `allow_nonfinite`, one with a NaN or an infinity.
        """
        path = directory / CHECKPOINT_NAME
        # The header alone is read first, so that a run that cannot be resumed is refused before a
        # model is built.
        saved = SavedRun.read(path)
        saved.require_resumable(config)
        # A resumed run keeps the twin that it had. Without this, another machine could choose
        # another baseline in the middle of the curve.
        config = replace(config, against=config.against or saved.config.against)
        # `start` loads initial weights, which the checkpoint then overwrites whole.
        trainer = cls.start(config, corpus, directory, parallel)
        header, arrays = load_checkpoint(path)
        for name, learner in trainer.learners.items():
            # `save` puts the learner's name before those of its arrays.
            own = [key for key in arrays if key.startswith(f"{name}/")]
            learner.load_state({key.removeprefix(f"{name}/"): arrays[key] for key in own})
        if not allow_nonfinite:
            require_finite_arrays(path, arrays)
        trainer.step = SavedRun.from_header(path, header).step
        # The metrics may be ahead of the checkpoint, because they are written after every step.
        # Those later steps are done again, so their records are left out.
        metrics = directory / METRICS_NAME
        trainer.records = continued_metrics(metrics, trainer.step, keeps=trainer.writes)
        return trainer

    def train(
        self,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train up to `config.train.steps`; True when all steps are done, False when `should_stop`
        asked to end earlier.

        A checkpoint is written every `checkpoint_every` steps (0: never in between) and at the end,
        however it comes about; none at all where `checkpoint` is False. The last step saves the
        tensors of `capture_layers`.

        Raises:
            TrainingError: the loss is not finite; the last good checkpoint stays.
            DumpError: tensors are to be captured, and their files cannot be written.
        """
        train = self.config.train
        # A signal reaches ranks at different steps. They agree before every step, so that all stop
        # after the same one.
        agreed = self.parallel.largest
        with (
            # Only rank 0 has the file; the others train through a null context.
            MetricsFile(self.directory / METRICS_NAME, self.records)
            if self.writes
            else nullcontext() as metrics
        ):
            while self.step < train.steps and not agreed(should_stop()):
                if self.step + 1 == train.steps:
                    self._capture_next_step()
                record = self._advance()
                self.records.append(record)
                if metrics is not None:
                    metrics.append(record)
                on_step(record)
                every = train.checkpoint_every if train.checkpoint else 0
                due = every and self.step % every == 0
                # The last step's checkpoint is written below in any case, so it is not written
                # twice.
                if due and self.step < train.steps:
                    self.save()
        if train.checkpoint:
            self.save()
        return self.step >= train.steps

    @property
    def writes(self) -> bool:
        """Whether this rank writes the files."""
        return self.parallel.layout.rank == 0

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
        save_checkpoint(self.directory / CHECKPOINT_NAME, saved.to_header(), arrays)

    def captured_path(self, layer: int) -> Path:
        """Where the last step saves the tensors of an MoE layer."""
        return self.directory / f"captured-step{self.config.train.steps}-layer{layer}.npz"

    def captured(self) -> list[Path]:
        """The files of `capture_layers` that are there whole, forward and backward; the log names
        the others.
        """
        paths = [self.captured_path(layer) for layer in self.config.capture_layers]
        whole = [path for path in paths if _has_backward(path)]
        for path in paths:
            if path not in whole:
                logger.warning("the last step's tensors are not in %s", path)
        return whole

    def _capture_next_step(self) -> None:
        """Under expert parallelism the experts of rank 0, which alone writes files."""
        for layer in self.config.capture_layers if self.writes else ():
            path = self.captured_path(layer)
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
        """Final figures, plain values; every rank calls it.

        Losses at the end and `load_imbalance` are means over the last steps, times are medians.
        `loss_gap` is a fraction (see `metrics.loss_gap`). Figures of the twin are None without one.
        `engine` is the one asked for, `engine_used` the one that ran.
        """
        main, twin = self.learners[MAIN], self.learners.get(FULL_PRECISION)
        # Evaluation is a collective, which is why every rank calls `summary`.
        held_out = self.evaluate()
        last = self.records[-smoothing_window(len(self.records)) :]
        return {
            "config": self.config.to_json(),
            "framework": self.config.framework,
            "precision": self.config.precision,
            "engine": self.config.engine,
            "engine_used": main.engine,
            "against": self.config.against if twin else None,
            "engine_full_precision": twin.engine if twin else None,
            "device": main.device,
            "parameters": main.num_parameters,
            "ranks": self.parallel.layout.world_size,
            "steps": self.step,
            "loss_start": self.records[0].loss if self.records else None,
            "loss_end": _over(np.mean, [r.loss for r in last]),
            "loss_end_full_precision": _over(np.mean, [r.full_precision_loss for r in last]),
            "held_out_loss": held_out.get(MAIN),
            "held_out_loss_full_precision": held_out.get(FULL_PRECISION),
            "loss_gap": recorded_loss_gap(self.records),
            "tokens_per_s": _over(np.median, [r.tokens_per_s for r in self.records]),
            "seconds_per_step": _over(np.median, [r.seconds for r in self.records]),
            "seconds_per_step_full_precision": _over(
                np.median, [r.full_precision_seconds for r in self.records]
            ),
            "load_imbalance": _over(np.mean, [r.load_imbalance for r in last]),
        }

    def _advance(self) -> StepRecord:
        train, step = self.config.train, self.step + 1
        # The whole batch on every rank, the same bits: a batch is a function of seed and step. Each
        # learner takes its rank's part.
        tokens = self.corpus.batch(step, train.batch_size, self.config.model.seq_len, train.seed)
        rate = train.learning_rate(step)
        result, seconds = _timed_step(self.learners[MAIN], tokens, rate)
        # Checked before `self.step` moves on, so a checkpoint never claims a step whose loss was
        # not finite.
        _require_finite(result, step, train.checkpoint)
        twin = self.learners.get(FULL_PRECISION)
        reference, reference_seconds = None, None
        if twin is not None:
            reference, reference_seconds = _timed_step(twin, tokens, rate)
            _require_finite(reference, step, train.checkpoint, " of the run in full precision")
        self.step = step
        num_tokens = train.batch_size * self.config.model.seq_len
        return StepRecord(
            step=step,
            loss=result.loss,
            aux_loss=result.aux_loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens_per_s=num_tokens / seconds,
            seconds=seconds,
            load_imbalance=load_imbalance(result.expert_counts),
            expert_load=expert_load(result.expert_counts),
            full_precision_loss=reference.loss if reference is not None else None,
            full_precision_seconds=reference_seconds,
        )


def baseline_for(engine: str) -> str:
    """The precision of the twin of a run whose experts are on `engine`: bf16 beside the FP8 kernels
    of a GPU, else fp32.
    """
    return "bf16" if engine == "hopper" else "fp32"


def require_startable(config: RunConfig, corpus: Corpus, world_size: int) -> None:
    """Refuse what can be refused before ranks join, and before anything of the model is allocated.
    CorpusError where the text is shorter than a sequence; ConfigError where the batch does not
    split over the ranks, or the memory is too small.
    """
    config.require_world(world_size)
    require_room(config, world_size)
    corpus.require_length(config.model.seq_len)


def _make_learners(config: RunConfig, parallel: Parallel) -> tuple[RunConfig, dict[str, Learner]]:
    """The learners, and the configuration with its baseline decided."""

    def make(precision: str, engine: str) -> Learner:
        sizes = config.model, config.train
        return make_learner(config.framework, *sizes, precision, engine, parallel)

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
    learner: Learner, tokens: np.ndarray, learning_rate: float
) -> tuple[StepResult, float]:
    """The step and its seconds; its figures are there when the device has done all of it."""
    # `train_step` returns numbers on the host, so the device has finished when the clock is read
    # again.
    started = time.perf_counter()
    result = learner.train_step(tokens, learning_rate)
    return result, time.perf_counter() - started


def _over(statistic: Callable[[list[float]], Any], values: list[float | None]) -> float | None:
    """`statistic` of the values; None where there are none, or none was recorded."""
    known = [value for value in values if value is not None]
    return float(statistic(known)) if known else None


def _require_finite(result: StepResult, step: int, saves: bool, whose: str = "") -> None:
    way_out = "this run writes no checkpoint: start it anew with a lower learning rate"
    if saves:
        way_out = "the last checkpoint is whole: resume from it with a lower learning rate"
    finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    words = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}{whose}; {way_out}"
    expect(finite, TrainingError, words)


def _has_backward(path: Path) -> bool:
    """Whether a captured step is there with what its backward brings."""
    try:
        return bool(read_npz(path, lambda names: ["name"] if "dout" in names else []))
    except NpzError:
        return False
