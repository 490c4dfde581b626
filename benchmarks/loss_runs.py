"""The runs of loss.py in a file, and the gaps that are read off them. Imports no framework."""

from __future__ import annotations

import json
import lzma
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ernie_compat.metrics import compared_losses, read_metrics
from ernie_compat.model_config import RunConfig
from ernie_compat.run_report import SUMMARY_NAME
from ernie_compat.trainer import METRICS_NAME

SCALE = 10**5  # a loss is stored as a whole number of 1e-5, far below every gap
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond the table the
# normal one is 2 % off at most.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL = 1.960
APART, PARTING_WINDOW = 1e-3, 50  # how far, and over how many steps, a pair is said to have parted


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval, which is unknown (NaN) of a single value."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The interval of at least one value, by Student's t."""
        mean, free = float(np.mean(values)), len(values) - 1
        if not free:
            return cls(mean, math.nan, math.nan)
        quantile = STUDENT_T[free - 1] if free <= len(STUDENT_T) else NORMAL
        # `ddof=1` is the unbiased variance; dividing by sqrt(n) makes it that of the mean.
        half = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Run:
    """One run from a point of a trunk, or from the initial weights (point 0).

    task: model, tokens of a step, text. trunk: the kind that trained up to the point.
    state: a digest of that trunk's losses, or its last loss, because another training of it may part from
    this one on a GPU. It is empty at point 0, and in older runs, of which each point had one trunk.
    seconds_per_step: 0 where other programs used the GPU beside this one. losses: of every step, in
    units of 1 / SCALE. held_out: step of the run -> loss. norms, busiest, idlest: of
    the first steps, the gradient's norm, and by MoE layer the tokens of the busiest and of the idlest
    expert over the mean. starved: of those steps, the experts of all layers that had hardly a token.
    """

    task: str
    trunk: str
    seed: int
    point: int
    order: int
    kind: str
    gpu: str
    seconds_per_step: float
    losses: list[int]
    held_out: dict[str, float]
    norms: list[float] = field(default_factory=list)
    busiest: list[list[float]] = field(default_factory=list)
    idlest: list[list[float]] = field(default_factory=list)
    starved: list[int] = field(default_factory=list)
    state: str = ""

    @property
    def key(self) -> tuple[str | int, ...]:
        return *self.partners, self.kind, len(self.losses)

    @property
    def partners(self) -> tuple[str | int, ...]:
        """What runs share that saw the same batches from the same state."""
        return self.task, self.trunk, self.seed, self.point, self.order, self.state


def read_runs(path: Path) -> list[Run]:
    """The runs of a file, which may be compressed and may not exist, or of a directory that `sonicmoe
    train --compare` left. A last line that a kill cut short is no run.
    """
    if path.is_dir():
        return _compared(path)
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = (lzma.decompress(content) if path.suffix == ".xz" else content).splitlines(
        keepends=True
    )
    return [Run(**json.loads(line)) for line in lines if line.endswith(b"\n")]


def _compared(directory: Path) -> list[Run]:
    """A finished run and its twin in full precision, which stands for BF16 in every figure.

    Raises:
        ValueError: the directory holds no run that ended, or one without a twin.
    """
    path = directory / SUMMARY_NAME
    if not path.exists():
        raise ValueError(f"{directory} holds no finished run: {SUMMARY_NAME} is missing")
    summary = json.loads(path.read_bytes())
    if summary["loss_gap"] is None:
        raise ValueError(f"{directory} was trained without --compare: it has no gap")
    config = RunConfig.from_json(summary["config"])
    same = replace(config.train, seed=0)
    task = f"{config.precision} beside {config.against}, {config.model}, {same}"
    own = f"{config.precision} on {summary['engine_used']}"
    curves = compared_losses(read_metrics(directory / METRICS_NAME))
    runs = []
    for kind, losses, twin in ((own, curves[0], ""), ("bf16", curves[1], "_full_precision")):
        loss, seconds = summary[f"held_out_loss{twin}"], summary[f"seconds_per_step{twin}"]
        run = Run(task, "none", config.train.seed, 0, 0, kind, summary["device"], seconds, [], {})
        held_out = {str(len(losses)): loss} if loss is not None else {}
        whole = [round(SCALE * loss) for loss in losses]
        runs.append(replace(run, losses=whole, held_out=held_out))
    return runs


def append_run(path: Path, run: Run) -> None:
    """Add a run; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.truncate(whole.rfind(b"\n") + 1)  # a kill may have cut the last line short
        file.write(_line(run))
        file.flush()
        os.fsync(file.fileno())


def gather(sources: Iterable[Path], path: Path) -> list[Run]:
    """Merge the runs of files into one compressed file; a later run replaces an equal one."""
    runs = {run.key: run for source in (path, *sources) for run in read_runs(source)}
    ordered = [runs[key] for key in sorted(runs)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(b"".join(map(_line, ordered)), preset=9 | lzma.PRESET_EXTREME))
    return ordered


def _line(run: Run) -> bytes:
    # Fields that hold nothing have their default when they are read.
    said = {name: value for name, value in asdict(run).items() if value not in ([], "")}
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def gap(run: Run, base: Run, first: int = 0, last: int | None = None) -> float:
    """The mean loss of a run over that of its partner, minus 1, of steps `first` to `last`."""
    return float(np.mean(run.losses[first:last]) / np.mean(base.losses[first:last]) - 1)


def held_out_gap(run: Run, base: Run, step: str) -> float:
    """The held-out loss of a run at a step over that of its partner, minus 1; NaN where one of them was
    not evaluated there.
    """
    losses = run.held_out.get(step, math.nan), base.held_out.get(step, math.nan)
    return losses[0] / losses[1] - 1


def with_bases(runs: Sequence[Run], kind: str) -> list[tuple[Run, Run]]:
    """The runs of a kind, each beside the BF16 run that shares its batches and its state."""
    bases = {(*run.partners, len(run.losses)): run for run in runs if run.kind == "bf16"}
    found = [(run, bases.get((*run.partners, len(run.losses)))) for run in runs if run.kind == kind]
    return [(run, base) for run, base in found if base is not None]


def curves(pairs: Sequence[tuple[Run, Run]], window: int) -> np.ndarray:
    """The gap of each pair over windows of steps: fp64 `[pairs, steps / window]`."""
    whole = len(pairs[0][0].losses) // window * window

    def means(run: Run) -> np.ndarray:
        return np.reshape(run.losses[:whole], (-1, window)).mean(1)

    return np.stack([means(run) / means(base) - 1 for run, base in pairs])


def parting(run: Run, base: Run) -> tuple[int | None, int]:
    """The first step whose losses lie `APART` apart, None where none do, and the first one of the
    windows of steps that all lie on that side of the partner on which the run ends.
    """
    gaps = np.array(run.losses) / np.array(base.losses) - 1
    apart = np.flatnonzero(np.abs(gaps) > APART)
    window = min(PARTING_WINDOW, len(gaps))
    sides = np.sign(curves([(run, base)], window)[0])
    others = np.flatnonzero(sides != sides[-1])
    return (
        int(apart[0]) + 1 if len(apart) else None,
        (int(others[-1]) + 1) * window + 1 if len(others) else 1,
    )


def said(values: Sequence[float]) -> str:
    """Mean and 95 % interval in per cent, of the values that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    one = Interval.of(known)
    if math.isnan(one.low):
        return f"{100 * one.mean:+.3f}"
    return f"{100 * one.mean:+.3f} [{100 * one.low:+.3f}, {100 * one.high:+.3f}]"
