"""The record of a training step, the JSON-lines file of records, and the figures made from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sonicmoe.errors import SonicMoEError, writing

from .checkpoint import published
from .model_config import smoothing_window


class MetricsError(SonicMoEError, ValueError):
    """The metrics file does not hold metrics."""


class StepResult(NamedTuple):
    """Numbers of one optimizer step: means over its micro-batches; `grad_norm` before clipping;
    tokens per expert int64 `[L_moe, E]`.
    """

    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    expert_counts: np.ndarray


@dataclass(frozen=True)
class StepRecord:
    """One line of the metrics file; `step` counts from 1.

    tokens_per_s is that of the run itself, without the full-precision twin. expert_load: share of
    routed slots per expert, `[L_moe][E]`, each row sums to 1. full_precision_loss and
    full_precision_seconds, the twin's, are None without `--compare`.
    """

    step: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    seconds: float
    expert_load: list[list[float]]
    full_precision_loss: float | None = None
    full_precision_seconds: float | None = None

    @property
    def load_imbalance(self) -> float:
        """The busiest expert's load over the mean, averaged over layers: 1 when balanced, E when one
        expert gets all.
        """
        return float(np.mean([max(row) * len(row) for row in self.expert_load]))


def begin_metrics(path: Path, records: Iterable[StepRecord] = ()) -> None:
    """Replace the file by exactly `records`, those before the step that a resumed run continues from:
    it repeats the steps behind its checkpoint, whose old lines must go.
    """
    write_whole(path, "".join(map(_line, records)))


def append_metrics(path: Path, record: StepRecord) -> None:
    """Add one line, which a reader of the file, or a killed run, then has."""
    with writing(path), path.open("a") as file:
        file.write(_line(record))


def write_whole(path: Path, text: str) -> None:
    """Write a file that is the old one or the new one at any moment."""
    with writing(path), published(path) as file:
        file.write(text.encode())


def read_metrics(path: Path, up_to_step: int | None = None) -> list[StepRecord]:
    """Records of `path` in order, those after `up_to_step` left out; an absent file has none.

    A last line cut short by a kill is ignored. MetricsError where another line is not a record.
    """
    if not os.path.lexists(path):
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise MetricsError(f"cannot read {path}: {error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(StepRecord(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):  # a kill may cut the last line, and only that one
                break
            raise MetricsError(f"{path}, line {number}, is not a metrics record: {error}") from None
    return [record for record in records if up_to_step is None or record.step <= up_to_step]


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Mean over the last `smoothing_window` steps at every step (over all steps so far where there
    are fewer); fp64 `[N]`.
    """
    window = smoothing_window(len(losses))
    # Differences of running sums: one pass however long the window is.
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(losses, dtype=np.float64))])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Mean of `|s - r| / r` over the last quarter of the steps, `s` and `r` the two smoothed losses;
    a fraction, not percent.

    Both curves see the same batches in the same order, so the noise of the batches cancels and the
    rest comes from the precision. ValueError where the curves differ in length or are empty.
    """
    if len(losses) != len(reference) or not len(losses):
        raise ValueError(
            f"loss_gap needs two curves of one length, got {len(losses)} and {len(reference)} steps"
        )
    last = max(1, round(len(losses) / 4))
    s, r = smoothed(losses)[-last:], smoothed(reference)[-last:]
    return float(np.mean(np.abs(s - r) / r))


def compared_losses(records: Sequence[StepRecord]) -> tuple[list[float], list[float]]:
    """The losses of a run and of its full-precision twin, at the steps that have both."""
    # All steps have both or none has, because a run is resumed with the --compare that it had.
    pairs = [(r.loss, r.full_precision_loss) for r in records if r.full_precision_loss is not None]
    return [loss for loss, _ in pairs], [reference for _, reference in pairs]


def _line(record: StepRecord) -> str:
    return json.dumps(asdict(record)) + "\n"
