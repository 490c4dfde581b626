"""The points of a sweep, in a file of JSON lines that can be continued; one line per point. Imports
no framework.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import SonicMoEError, expect
from .shapes import Shape

_MOST_US = 1e15
_BEGINNING = '{"tokens": '  # of a line: the first size


class SweepError(SonicMoEError, ValueError):
    """The file of a sweep cannot be read, or has too few points."""


@dataclass(frozen=True)
class Point:
    """One measurement. us: busy time of forward and backward on a GPU, wall time elsewhere; None
    where the engine refused. SweepError where a figure is of another kind.
    """

    shape: Shape
    engine: str
    fp8: bool
    device: str
    us: float | None
    date: str = ""
    refusal: str | None = None

    def __post_init__(self) -> None:
        us, words = self.us, (self.engine, self.device, self.date, self.refusal or "")
        timed = us is None or (isinstance(us, int | float) and 1e-3 <= us <= _MOST_US)
        expect(timed, SweepError, f"us is {us!r:.60}; needed: microseconds above 0, or null")
        kinds = all(isinstance(word, str) for word in words) and isinstance(self.fp8, bool)
        expect(
            kinds, SweepError, "engine, device, date or refusal is no text, or fp8 no truth value"
        )

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


def cut_line(text: str) -> str:
    """The last line of a sweep where a kill cut it short: it begins as a point does, has no end, and
    is no JSON. "" where the last line is anything else.
    """
    last = text[text.rfind("\n") + 1 :]
    if not (last.startswith(_BEGINNING) or _BEGINNING.startswith(last)):
        return ""
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return last
    return ""


def read_points(path: Path) -> Iterator[Point]:
    """Every point of a file, refusals too; a last line cut short by a kill is ignored. SweepError
    where another line is no point, or the file is no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SweepError(f"{path} is no sweep: {error}") from None
    for number, line in enumerate(text.removesuffix(cut_line(text)).splitlines(), start=1):
        try:
            yield Point.parse(line)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise SweepError(f"{path}, line {number}, is not a point of a sweep: {error}") from None
