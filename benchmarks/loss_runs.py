"""The runs of loss.py in a file, and the gaps that are read off them. Imports no framework."""

from __future__ import annotations

import json
import lzma
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ernie_compat.gap_runs import Interval

SCALE = 10**5  # a loss is stored as a whole number of 1e-5, far below every gap


@dataclass(frozen=True)
class Run:
    """One run from a point of a trunk, or from the initial weights (point 0).

    task: model, tokens of a step, text. trunk: the kind that trained up to the point. losses: of
    every step, in units of 1 / SCALE. held_out: step of the run -> loss. norms, busiest, idlest: of
    the first steps, the gradient's norm, and by MoE layer the tokens of the busiest and of the idlest
    expert over the mean.
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

    @property
    def key(self) -> tuple[str, str, int, int, int, str, int]:
        return *self.partners, self.kind, len(self.losses)

    @property
    def partners(self) -> tuple[str, str, int, int, int]:
        """What runs share that saw the same batches from the same state."""
        return self.task, self.trunk, self.seed, self.point, self.order


def read_runs(path: Path) -> list[Run]:
    """The runs of a file, which may be compressed and may not exist. A last line that a kill cut
    short is no run.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = (lzma.decompress(content) if path.suffix == ".xz" else content).splitlines(
        keepends=True
    )
    return [Run(**json.loads(line)) for line in lines if line.endswith(b"\n")]


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
    said = {name: value for name, value in asdict(run).items() if value != []}
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def gap(run: Run, base: Run, first: int = 0, last: int | None = None) -> float:
    """The mean loss of a run over that of its partner, minus 1, of steps `first` to `last`."""
    return float(np.mean(run.losses[first:last]) / np.mean(base.losses[first:last]) - 1)


def held_out_gap(run: Run, base: Run, step: str) -> float:
    """The same of the held-out losses at a step; NaN where one was not evaluated there."""
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


def said(values: Sequence[float]) -> str:
    """Mean and 95 % interval in per cent, of the values that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    one = Interval.of(known)
    if math.isnan(one.low):
        return f"{100 * one.mean:+.3f}"
    return f"{100 * one.mean:+.3f} [{100 * one.low:+.3f}, {100 * one.high:+.3f}]"
