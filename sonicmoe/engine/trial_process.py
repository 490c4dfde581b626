"""The process in which an engine is tried (`trial.py`): started, followed to its end, and killed with
everything that it started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import writing
from ..interop import FRAMEWORK
from ..jit.child import search_path
from .trial import DONE, EVENTS, REQUEST

# The kernel kills this process with the one that started it, however that ends.
_PROGRAM = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(1, 9); "
    "from sonicmoe.frameworks import load; load({framework!r}); "
    "from sonicmoe.engine.trial import main; sys.exit(main(sys.argv[1]))"
)
# Seconds between two looks: far below the shortest case, and no load for the host.
_POLL_S = 0.05
# Bytes of output that are kept: an error stands at the end, whatever libraries print before.
_LAST_WORDS = 4000
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")

Event = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds until the reference engine has run in a new process, and for each case."""

    start: float = 300.0
    case: float = 60.0


LIMITS = Limits()


def run_trial(request: dict[str, Any], limits: Limits) -> tuple[list[Event], str | None, str]:
    """A process that tries an engine: its events; how it ended, in words, or None where every case
    was run; and the end of what it printed. It is gone afterwards.
    """
    # A new interpreter and no fork: a forked process would share the parent's CUDA context and
    # locks.
    program = _PROGRAM.format(framework=FRAMEWORK)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as printed:
        folder = Path(directory)
        with writing(folder):
            (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, directory],
            env={**os.environ, "PYTHONPATH": search_path()},
            stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            start_new_session=True,
        )  # fmt: skip
        try:
            events, ended = _follow(process, folder / EVENTS, limits)
        finally:
            with suppress(ProcessLookupError):
                # The whole group, because a compiler or a debugger of the child may still run.
                os.killpg(process.pid, signal.SIGKILL)
            # A driver that tears a hanging kernel down may take its time; nobody waits for it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _LAST_WORDS))
        return events, ended, printed.read().decode(errors="replace").strip()


def _follow(
    process: subprocess.Popen[bytes], path: Path, limits: Limits
) -> tuple[list[Event], str | None]:
    """Its events and its end; the limit begins again with every event."""
    events: list[Event] = []
    heard = time.monotonic()
    while True:
        # Asked first: a process that has ended has written everything.
        ended = _end_of(process)
        found = _events(path)
        if len(found) > len(events):
            events, heard = found, time.monotonic()
        if events and events[-1]["event"] == DONE:
            return events, None
        limit = limits.case if events else limits.start
        if ended is None and time.monotonic() - heard > limit:
            ended = f"did not end within {limit:.0f} s"
        if ended is not None:
            return events, ended


def _events(path: Path) -> list[Event]:
    """Those that are written to their end."""
    try:
        # What follows the last line break is half written.
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:  # it has not begun
        return []
    return [json.loads(line) for line in lines]


def _end_of(process: subprocess.Popen[bytes]) -> str | None:
    """How it ended, in words; None: it runs."""
    try:
        status = process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None
    # Nothing that an engine does ends in this signal: the kernel or a person sent it.
    if status == -signal.SIGKILL:
        return "killed"
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    return f"exit status {status}"


def quoted(words: str) -> str:
    """The error that ended the process: CUDA's are followed by lines of advice."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return "".join(f" ({line})" for line in (errors or lines)[-1:])
