"""The loss gap of `sonicmoe train --compare` runs over seeds, with its confidence interval, so
that a reader can tell a normal gap from a loss; `lossgap.py` prints it. Imports no framework.

A run's gap is `metrics.loss_gap`: the mean of |s - r| / r over the last quarter of the
steps, s and r being the two smoothed losses. The signed gap is the same without the absolute value:
positive where the run is worse than full precision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.errors import ConfigError, SonicMoEError, expect

from .metrics import GAP_TAIL, compared_losses, loss_gap, read_metrics, smoothed
from .model_config import RunConfig
from .run_directory import SUMMARY_NAME
from .trainer import METRICS_NAME

Array = np.ndarray

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond the table the
# normal one is 2 % off at most.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL = 1.960


class LossGapError(SonicMoEError, ValueError):
    """A directory does not hold a finished run with `--compare`."""


@dataclass(frozen=True, eq=False)
class GapRun:
    """One run. Gaps are fractions; `curve` is the signed gap of the smoothed losses at every step."""

    directory: Path
    kind: str
    seed: int
    steps: int
    gap: float
    signed_gap: float
    held_out_gap: float | None
    curve: Array


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval (Student's t), cut at what is possible, and the
    standard deviation of the values; interval and deviation of a single run are unknown: NaN.
    """

    mean: float
    low: float
    high: float
    deviation: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float], least: float = -math.inf) -> Interval:
        """Of at least one value, none of which can be below `least`."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        # n values have n - 1 degrees of freedom, and the table starts at 1.
        quantile = STUDENT_T[len(values) - 2] if len(values) - 2 < len(STUDENT_T) else NORMAL
        # `ddof=1` is the unbiased variance; dividing by sqrt(n) makes it that of the mean.
        deviation = float(np.std(values, ddof=1))
        half = quantile * deviation / math.sqrt(len(values))
        return cls(mean, max(least, mean - half), mean + half, deviation)


@dataclass(frozen=True)
class GapSummary:
    """Runs of one kind that differ in the seed. `shifted`: the interval of the signed gap leaves
    out zero.
    """

    kind: str
    runs: int
    gap: Interval
    worst: float
    signed_gap: Interval
    held_out_gap: Interval | None

    @property
    def shifted(self) -> bool:
        """Whether the precision costs (or gains) loss beyond what seeds explain; False when a
        single run cannot tell.
        """
        return self.signed_gap.low > 0 or self.signed_gap.high < 0


def read_run(directory: Path) -> GapRun:
    """Read what `sonicmoe train --compare --out directory` left. LossGapError where no finished run
    is there, or one without `--compare`; MetricsError or CheckpointError where its files are
    damaged.
    """
    summary_path = directory / SUMMARY_NAME
    words = f"{directory} holds no finished run: {SUMMARY_NAME} is missing"
    expect(summary_path.exists(), LossGapError, words)
    summary = _read_summary(summary_path)
    losses, references = compared_losses(read_metrics(directory / METRICS_NAME))
    words = f"{directory} was trained without --compare: there is nothing to measure a gap from"
    expect(bool(losses), LossGapError, words)
    config = _config(directory, summary)
    # Where a loss is infinite or zero, every figure below would be too.
    sound = all(0 < value < math.inf for value in (*losses, *references))
    expect(sound, LossGapError, f"{directory} has a loss that is not a positive number")
    curve, gap, signed_gap = gap_curve(losses, references)
    held_out, reference = (
        _figure(summary, name, summary_path)
        for name in ("held_out_loss", "held_out_loss_full_precision")
    )
    return GapRun(
        directory=directory,
        kind=_kind(summary, config),
        seed=config.train.seed,
        steps=len(losses),
        gap=gap,
        signed_gap=signed_gap,
        held_out_gap=held_out / reference - 1 if held_out and reference else None,
        curve=curve,
    )


def gap_curve(losses: Sequence[float], references: Sequence[float]) -> tuple[Array, float, float]:
    """`(curve, gap, signed gap)` as of `GapRun`, of positive losses, equally many."""
    # Smoothed before the division: a ratio of single steps is mostly noise.
    curve = smoothed(losses) / smoothed(references) - 1
    tail = max(1, round(len(curve) * GAP_TAIL))
    return curve, loss_gap(losses, references), float(np.mean(curve[-tail:]))


def _read_summary(path: Path) -> dict[str, Any]:
    expect(path.is_file(), LossGapError, f"{path} is no regular file")
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LossGapError(f"cannot read {path}: {error}") from None
    expect(isinstance(summary, dict), LossGapError, f"{path} is no summary of a run")
    return summary  # type: ignore[no-any-return]


def _config(directory: Path, summary: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.from_json(summary.get("config", {}))
    except ConfigError as error:
        raise LossGapError(f"{directory / SUMMARY_NAME} is damaged: {error}") from None


def _figure(summary: dict[str, Any], name: str, path: Path) -> float | None:
    value = summary.get(name)
    # None where a run was not evaluated on held-out text.
    number = isinstance(value, float | int) and math.isfinite(value)
    expect(value is None or number, LossGapError, f"{path} has {name} {value!r}; needed: a number")
    return value


def _kind(summary: dict[str, Any], config: RunConfig) -> str:
    """The settings that runs must share to be averaged, as one line."""
    model = config.model
    sizes = f"H={model.hidden_size}, I={model.intermediate_size}, E={model.num_experts}"
    # Of the summary and not of the configuration: the steps are those that were done.
    precision, framework, engine, steps = (
        summary.get(name) for name in ("precision", "framework", "engine", "steps")
    )
    ran = f"{precision} on {framework}, engine {engine}, {steps} steps"
    return f"{ran}, {sizes}, K={model.topk}, L={model.num_layers}"


def summarise(runs: Sequence[GapRun]) -> list[GapSummary]:
    """One summary per kind, in the order of their first run. LossGapError where a seed occurs twice
    in a kind: such runs are one experiment, not two.
    """
    summaries = []
    # A dictionary keeps the order in which kinds were first seen; a set would not.
    for kind in dict.fromkeys(run.kind for run in runs):
        own = [run for run in runs if run.kind == kind]
        seeds = [run.seed for run in own]
        twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        words = f"seed {twice} occurs more than once among the runs of {kind}"
        expect(not twice, LossGapError, words)
        held_out = [run.held_out_gap for run in own if run.held_out_gap is not None]
        summaries.append(
            GapSummary(
                kind=kind,
                runs=len(own),
                # A gap has no sign, so its interval cannot reach below zero.
                gap=Interval.of([run.gap for run in own], least=0.0),
                worst=max(run.gap for run in own),
                signed_gap=Interval.of([run.signed_gap for run in own]),
                held_out_gap=Interval.of(held_out) if held_out else None,
            )
        )
    return summaries
