"""Consoles for progress, which must never cost a step of the work that it shows."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console


class SteadyStream:
    """A text stream that goes on where the one below it cannot write: a disk is full, or a terminal
    was closed.
    """

    def __init__(self, stream: IO[str]) -> None:
        """Write to `stream`."""
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


def progress_console(**options: Any) -> Console:
    """A console on stderr, so that stdout holds the result alone; options as of rich's."""
    # A process may have been started without stderr. rich takes that for silence.
    stream = None if sys.stderr is None else cast(IO[str], SteadyStream(sys.stderr))
    return Console(file=stream, stderr=True, **options)
