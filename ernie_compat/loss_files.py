"""Losses out of files that other programs wrote, and the gap between two of them. Imports no
framework.

A file is CSV (separated by commas, semicolons, tabs or spaces, with a header or a single column),
JSON lines, a JSON list, or the `trainer_state.json` of transformers. A directory is a run of
`sonicmoe train`. Rows without a loss, such as those of an evaluation, are left out and counted.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.errors import expect

from .gap_runs import GapRun, LossGapError, gap_curve
from .model_config import smoothing_window
from .trainer import METRICS_NAME

LOSS = "loss"
STEP_NAMES = ("step", "global_step", "iteration", "iter")
_SEPARATORS = ",\t;"
_Row = tuple[str, dict[str, Any]]  # the place, for messages; cells by the name of their column


@dataclass(frozen=True)
class LossFile:
    """What a file says.

    steps: of each loss, ascending; None where the file has none. left_out: rows without a loss.
    """

    path: Path
    losses: tuple[float, ...]
    steps: tuple[int, ...] | None
    left_out: int

    @property
    def window(self) -> int:
        """Losses that each is averaged over."""
        return smoothing_window(len(self.losses))

    @property
    def end(self) -> float:
        """Mean of the last losses, as many as are smoothed over."""
        return float(np.mean(self.losses[-self.window :]))

    @property
    def by_step(self) -> dict[int, float]:
        """The losses; where the file has no steps, its rows are counted."""
        steps = range(len(self.losses)) if self.steps is None else self.steps
        return dict(zip(steps, self.losses, strict=True))

    def at(self, steps: Sequence[int]) -> LossFile:
        """The same file at some of its steps."""
        losses = tuple(self.by_step[step] for step in steps)
        return LossFile(
            self.path, losses, None if self.steps is None else tuple(steps), self.left_out
        )

    def to_json(self) -> dict[str, Any]:
        """What was read, without the losses themselves."""
        return {
            "path": str(self.path),
            "rows": len(self.losses),
            "left_out": self.left_out,
            "steps": None if self.steps is None else [self.steps[0], self.steps[-1]],
            "end": self.end,
            "window": self.window,
        }

    def __str__(self) -> str:
        """`FILE has 100 losses at steps 1 to 100`."""
        steps = "" if self.steps is None else f" at steps {self.steps[0]} to {self.steps[-1]}"
        return f"{self.path} has {len(self.losses)} losses{steps}"


def read_losses(path: Path, column: str | None = None, *, keeps_missing: bool = False) -> LossFile:
    """The losses of a file, or of a run of `sonicmoe train`.

    Args:
        path: the file, or the directory of the run.
        column: the column, or the key, that holds the loss; its number from 1 where a file has no
            header. Default: `loss`, or the only column.
        keeps_missing: losses that are nan stay, for `without_missing`.

    Raises:
        LossGapError: it cannot be read, has no such column, a loss that is no positive number, or
            steps that do not ascend. The message names the file and the row.
    """
    path = path / METRICS_NAME if path.is_dir() else path
    expect(path.is_file(), LossGapError, f"{path} is no file of losses")
    try:
        # Spreadsheets put a byte-order mark before the first column's name.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LossGapError(f"cannot read {path}: {error}") from None
    rows = (_json_rows if text.lstrip()[:1] in {"{", "["} else _table_rows)(path, text)
    name = _loss_column(path, rows, column)
    # Trainers log evaluations between the steps, as rows without the column of the loss.
    held = [row for row in rows if row[1].get(name) not in (None, "")]
    losses = tuple(_loss(row, name, keeps_missing) for row in held)
    return LossFile(path, losses, _steps(path, held), len(rows) - len(held))


def without_missing(run: LossFile, reference: LossFile) -> tuple[LossFile, LossFile, int]:
    """Both files at the steps at which both have a loss, and how many steps were dropped. Where a
    file has no steps, its rows are counted.

    Raises:
        LossGapError: no step is left; or rows are counted and not equally many.
    """
    if run.steps is None or reference.steps is None:
        _require_same_steps(run, reference)
        run, reference = (LossFile(f.path, f.losses, None, f.left_out) for f in (run, reference))
    ours, theirs = run.by_step, reference.by_step
    every = sorted(ours.keys() | theirs.keys())
    common = [
        step
        for step in every
        if not math.isnan(ours.get(step, math.nan) + theirs.get(step, math.nan))
    ]
    what = f"{run.path} and {reference.path} have no step at which both have a loss"
    expect(bool(common), LossGapError, what)
    return run.at(common), reference.at(common), len(every) - len(common)


def compare_files(run: LossFile, reference: LossFile) -> GapRun:
    """The gap of `run` against `reference`, row by row.

    Raises:
        LossGapError: they do not have the same steps, or not equally many losses.
    """
    _require_same_steps(run, reference)
    curve, gap, signed = gap_curve(run.losses, reference.losses)
    steps = run.steps or reference.steps
    return GapRun(
        directory=run.path,
        kind=f"{run.path} against {reference.path}",
        seed=None,
        steps=len(curve),
        gap=gap,
        signed_gap=signed,
        held_out_gap=None,
        curve=curve,
        at=None if steps is None else np.asarray(steps),
    )


def _require_same_steps(run: LossFile, reference: LossFile) -> None:
    if run.steps is not None and reference.steps is not None and run.steps != reference.steps:
        # One step as an example says more than two lists of a thousand.
        strays = sorted(set(run.steps) ^ set(reference.steps))
        raise LossGapError(
            f"{run}, {reference}: step {strays[0]} is in one of them alone; "
            "needed: the same steps in both; --skip-missing drops those that one lacks"
        )
    words = f"{run}, {reference}; needed: equally many, one for each step of both"
    expect(len(run.losses) == len(reference.losses), LossGapError, words)


def _json_rows(path: Path, text: str) -> list[_Row]:
    """Of one document, or of a document on every line."""
    try:
        whole = json.loads(text)
    # JSON lines are no JSON document, unless there is a single line.
    except (ValueError, RecursionError):
        lines = [(f"{path}, line {n}", line) for n, line in _filled(text)]
        return [_json_row(place, _parsed(place, line)) for place, line in lines]
    if isinstance(whole, dict):
        # trainer_state.json; any other object is a file of one line.
        whole = whole.get("log_history", [whole])
    expect(isinstance(whole, list), LossGapError, f"{path} has no list of losses")
    return [_json_row(f"{path}, entry {n}", entry) for n, entry in enumerate(whole, start=1)]


def _filled(text: str) -> list[tuple[int, str]]:
    return [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _parsed(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LossGapError(f"{place}, is no JSON: {error}") from None


def _json_row(place: str, entry: Any) -> _Row:
    if isinstance(entry, dict):
        return place, entry
    number = isinstance(entry, int | float) and not isinstance(entry, bool)
    expect(number, LossGapError, f"{place} is {entry!r:.40}; needed: an object, or a number")
    return place, {LOSS: entry}


def _table_rows(path: Path, text: str) -> list[_Row]:
    """Of lines of cells. Lines that begin with # are comments."""
    lines = [(n, line) for n, line in _filled(text) if not line.lstrip().startswith("#")]
    expect(bool(lines), LossGapError, f"{path} is empty")
    split = _splitter(lines[0][1])
    try:
        cells = [(f"{path}, line {n}", [cell.strip() for cell in split(x)]) for n, x in lines]
    except csv.Error as error:
        raise LossGapError(f"cannot read {path}: {error}") from None
    # A first line of numbers is no header. Its columns then have numbers for names.
    first = cells[0][1]
    if all(_number(cell) is not None for cell in first):
        names = [LOSS] if len(first) == 1 else [str(n) for n in range(1, len(first) + 1)]
    else:
        names, cells = first, cells[1:]
    for place, row in cells:
        wide = f"{place}, has {len(row)} cells; needed: {len(names)}, as in the first line"
        expect(len(row) == len(names), LossGapError, wide)
    return [(place, dict(zip(names, row, strict=True))) for place, row in cells]


def _splitter(line: str) -> Callable[[str], list[str]]:
    """By the first separator that the line has, or by spaces."""
    separator = next((mark for mark in _SEPARATORS if mark in line), None)
    if separator is None:
        return str.split
    return lambda text: next(csv.reader([text], delimiter=separator))


def _number(value: Any) -> float | None:
    """None for what is no number."""
    # Python counts True as 1, and a whole number of JSON may be larger than a float can be.
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _loss_column(path: Path, rows: Sequence[_Row], asked: str | None) -> str:
    """The name of the column, in the file's own spelling."""
    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    expect(bool(names), LossGapError, f"{path} has no losses")
    # A single column needs no name: it is what the file is about.
    if asked is None and len(names) == 1:
        return names[0]
    wanted = LOSS if asked is None else asked
    found = next((name for name in names if name.lower() == wanted.lower()), None)
    if found is None:
        raise LossGapError(
            f"{path} has no column {wanted!r}; its columns are {names}, and --column names one"
        )
    return found


def _loss(row: _Row, name: str, keeps_missing: bool) -> float:
    place, cells = row
    loss = _number(cells[name]) or 0.0
    missing = math.isnan(loss)
    # The gap is a ratio of losses.
    sound = 0 < loss < math.inf or (missing and keeps_missing)
    remedy = "; --skip-missing drops its step from both files" if missing else ""
    found = f"{place}: {name} is {cells[name]!r:.40}"
    expect(sound, LossGapError, f"{found}; needed: a positive number{remedy}")
    return loss


def _steps(path: Path, rows: Sequence[_Row]) -> tuple[int, ...] | None:
    expect(bool(rows), LossGapError, f"{path} has no losses")
    # Frameworks spell the step in several ways; the first that a row has counts.
    names = {name.lower(): name for name in rows[0][1]}
    name = next((names[known] for known in STEP_NAMES if known in names), None)
    if name is None:
        return None
    steps: list[int] = []
    for place, cells in rows:
        number = _number(cells.get(name))
        if number is None or not number.is_integer():  # nor NaN and infinity
            found = f"{place}: {name} is {cells.get(name)!r:.40}"
            raise LossGapError(f"{found}; needed: a whole number")
        rises = not steps or number > steps[-1]
        last = f"{name} {number:.0f} comes after {steps[-1] if steps else 0}"
        needed = "needed: ascending steps (a run that was resumed may have logged some twice)"
        expect(rises, LossGapError, f"{place}: {last}; {needed}")
        steps.append(int(number))
    return tuple(steps)
