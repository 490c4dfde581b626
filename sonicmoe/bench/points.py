"""The points of a sweep, in a file of JSON lines that can be continued; one line per point. Imports
no framework.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SonicMoEError
from .shapes import Shape


class SweepError(SonicMoEError, ValueError):
    """The file of a sweep cannot be read."""


@dataclass(frozen=True)
class Point:
    """One measurement. `us` is busy time of forward and backward on a GPU, wall time elsewhere;
    None where the engine refused.

    percent: half the interquartile range of `us` over the steps measured. wall_us: wall time per
    layer of the same steps unprofiled. sustained_us, sm_mhz, watts, joules: time, SM clock, power
    and energy per layer of a sustained row (`figures.Sustained`); None where none was asked for, or
    where NVML gives nothing.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    engine: str
    fp8: bool
    device: str
    us: float | None
    percent: float | None = None
    wall_us: float | None = None
    sustained_us: float | None = None
    sm_mhz: float | None = None
    watts: float | None = None
    joules: float | None = None
    date: str = ""
    refusal: str | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.tokens, self.hidden, self.intermediate, self.experts, self.topk)

    @property
    def group(self) -> str:
        """Points that one model describes: an engine on a device."""
        return f"{self.engine} on {self.device}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two measurements of one thing: the second is unnecessary."""
        # Without the date and the figures: a sweep asks whether it has this point already.
        return (self.shape, self.engine, self.device)


def read_points(path: Path) -> list[Point]:
    """Every measured point of a file, refusals left out; a last line cut short by a kill is
    ignored.

    Raises:
        SweepError: another line is no point.
    """
    return [point for point in all_points(path) if point.us is not None]


def all_points(path: Path) -> Iterator[Point]:
    """The same with refusals."""
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield Point(**json.loads(line))
        except (ValueError, TypeError) as error:
            # A kill may cut the last line and no other.
            if number == len(lines):
                return
            raise SweepError(f"{path}, line {number}, is not a point of a sweep: {error}") from None
