"""The points of a sweep, in a file of JSON lines that can be continued; one line per point. Imports
no framework.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import SonicMoEError
from .shapes import Shape


class SweepError(SonicMoEError, ValueError):
    """The file of a sweep cannot be read, or has too few points."""


@dataclass(frozen=True)
class Point:
    """One measurement. us: busy time of forward and backward on a GPU, wall time elsewhere; None
    where the engine refused.
    """

    shape: Shape
    engine: str
    fp8: bool
    device: str
    us: float | None
    date: str = ""
    refusal: str | None = None

    @property
    def group(self) -> str:
        """Points that one model describes: an engine on a device."""
        return f"{self.engine} on {self.device}"

    @classmethod
    def parse(cls, line: str) -> Point:
        """What `line` gave. A line from before may have figures that no point has any more."""
        data = json.loads(line)
        sizes = (data.pop(field.name) for field in dataclasses.fields(Shape))
        shape = Shape(*sizes)
        known = {field.name for field in dataclasses.fields(cls)} - {"shape"}
        return cls(shape, **{name: data[name] for name in data if name in known})

    def line(self) -> str:
        """JSON, the sizes beside the figures."""
        figures = {name: value for name, value in vars(self).items() if name != "shape"}
        return json.dumps({**vars(self.shape), **figures}) + "\n"


def read_points(path: Path) -> Iterator[Point]:
    """Every point of a file, refusals too; a last line cut short by a kill is ignored. SweepError
    where another line is no point, or the file is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SweepError(f"{path} is no sweep: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield Point.parse(line)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # A kill may cut the last line and no other.
            if number == len(lines):
                return
            raise SweepError(f"{path}, line {number}, is not a point of a sweep: {error}") from None
