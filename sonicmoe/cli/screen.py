"""What a command says while somebody waits: on stderr, and never at the cost of a step of the work."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table

# Somebody who waits longer than this wants to know what for: the time before the first line, and
# between two; and the shortest work whose duration is told at its end.
PATIENCE_S = 10.0


class SteadyStream:
    """A text stream that goes on where the one below it cannot write: a disk is full, or a terminal
    was closed.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # ValueError: the stream was closed.
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own: `isatty`, `fileno`, `encoding`."""
        return getattr(self._stream, name)


class WordConsole(Console):
    """On a terminal lines break between words, and in a pipe, where programs read them, nowhere.
    Characters of a text mean themselves.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        told = all(isinstance(each, str) for each in objects)
        super().print(*objects, **{"soft_wrap": told and not self.is_terminal, **options})


def progress_console(**options: Any) -> Console:
    """A console on stderr, so that stdout holds the result alone; options as of rich's.

    It writes control characters to a terminal only. rich would also write them into a pipe where
    FORCE_COLOR is set, as it is on many build machines.
    """
    # A process may have been started without stderr. rich takes that for silence.
    if sys.stderr is None:
        return WordConsole(stderr=True, **options)
    if not _is_terminal(sys.stderr):
        options = {"force_terminal": False, "force_interactive": False, **options}
    return WordConsole(file=cast(IO[str], SteadyStream(sys.stderr)), stderr=True, **options)


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):  # it was closed
        return False


@dataclass(frozen=True)
class _Stage:
    """A part of the work. `total`: how many of `done` there will be; None where nobody knows.
    `began`: when it did, on the monotonic clock.
    """

    name: str
    total: int | None = None
    done: int = 0
    detail: str = ""
    began: float = 0.0

    def line(self, seconds: float) -> str:
        """`measuring normal: 3 of 12, about 2 min left, 40 s so far`."""
        words = [] if self.total is None else [f"{self.done} of {self.total}"]
        if self.total and self.done:
            left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
            words.append(f"about {duration(left)} left")
        title = f"{self.name} {self.detail}".rstrip()
        return f"{title}: {', '.join([*words, f'{duration(seconds)} so far'])}"


class Activity:
    """Work that may take long: a line every `patience_s` seconds, and at its end one with its
    duration, where it took `PATIENCE_S`. A context manager.

        with Activity("bench") as doing:
            doing.begin("measuring", total=3)
            for name in names:
                doing.at(name)
                ...
                doing.advance()
    """

    def __init__(
        self, name: str, console: Console | None = None, patience_s: float | None = None
    ) -> None:
        """Nothing is said before the work begins; `name`: of the work, as the last line has it."""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.console = progress_console() if console is None else console
        self._name, self._started, self._stage = name, time.monotonic(), _Stage(name)
        self._ended = threading.Event()
        # A thread, because one step of the work may itself take minutes.
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    # Each of these is one assignment, so that the thread never sees half a change.

    def begin(self, name: str, total: int | None = None) -> None:
        """A new stage; the count starts again."""
        self._stage = _Stage(name, total, began=time.monotonic())

    def at(self, detail: str) -> None:
        """Tell which part of the stage comes now."""
        self._stage = replace(self._stage, detail=detail)

    def advance(self) -> None:
        self._stage = replace(self._stage, done=self._stage.done + 1)

    def say(self, line: str) -> None:
        self.console.print(line)

    def __enter__(self) -> Activity:
        self._started = time.monotonic()
        self._lines.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the lines. An error is told by whoever catches it."""
        # They end before anything else is printed, so that none comes behind the result.
        self._ended.set()
        self._lines.join()
        if error is None:
            say_duration(self._name, self._started, self.console)

    def _print_lines(self) -> None:
        while not self._ended.wait(self._patience_s):
            self.say(self._stage.line(time.monotonic() - self._started))


def print_table(table: Table) -> None:
    """A table of the result, on stdout."""
    # Piped output must not be folded to 80 columns.
    width = None if Console().is_terminal else 240
    Console(highlight=False, width=width).print(table)


def say_duration(name: str, started: float, console: Console) -> None:
    """`bench took 3 min 5 s`, where it took longer than somebody waits gladly."""
    seconds = time.monotonic() - started
    if seconds >= PATIENCE_S:
        console.print(f"{name} took {duration(seconds)}")


def duration(seconds: float) -> str:
    """`12 s`, `3 min 5 s`, `2 h 4 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
