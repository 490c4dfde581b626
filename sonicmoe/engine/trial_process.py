"""The process in which an engine is tried (`trial.py`): started, followed to its end, and killed with
everything that it started.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from ..interop import FRAMEWORK
from ..jit.child import search_path
from .trial import DONE, Request

# The kernel kills this process with the one that started it, however that ends. Events go to a copy
# of descriptor 1, because libraries print to it.
_PROGRAM = (
    "import ctypes, os; ctypes.CDLL(None).prctl(1, 9); events = os.dup(1); os.dup2(2, 1); "
    "from sonicmoe.frameworks import load; load({framework!r}); "
    "from sonicmoe.engine.trial import main; main(events)"
)
# Bytes of output that are kept: an error stands at the end, whatever libraries print before.
_LAST_WORDS = 4000
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")

Event = dict[str, Any]


# Seconds until the reference engine has run in a new process, and for each case.
START_S, CASE_S = 300.0, 60.0


def run_trial(request: Request) -> tuple[list[Event], str | None, str]:
    """A process that tries an engine: its events; how it ended, in words, or None where every case
    was run; and the end of what it printed. It is gone afterwards.
    """
    # A new interpreter and no fork: a forked process would share the parent's CUDA context and
    # locks.
    program = _PROGRAM.format(framework=FRAMEWORK)
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            env={**os.environ, "PYTHONPATH": search_path()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            # Both processes are of one user and one code.
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(pickle.dumps(request))
            events, ended = _follow(process)
        finally:
            with suppress(ProcessLookupError):
                # The whole group, because a compiler or a debugger of the child may still run.
                os.killpg(process.pid, signal.SIGKILL)
            # A driver that tears a hanging kernel down may take its time; nobody waits for it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.stdout.close()
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _LAST_WORDS))
        return events, ended, printed.read().decode(errors="replace").strip()


def _follow(process: subprocess.Popen[bytes]) -> tuple[list[Event], str | None]:
    """Its events and its end; the limit begins again with every event."""
    assert process.stdout is not None
    events: list[Event] = []
    half_a_line = b""
    with selectors.DefaultSelector() as output:
        output.register(process.stdout, selectors.EVENT_READ)
        while True:
            limit = CASE_S if events else START_S
            if not output.select(limit):
                return events, f"did not end within {limit:.0f} s"
            said = os.read(process.stdout.fileno(), 1 << 16)
            *lines, half_a_line = (half_a_line + said).split(b"\n")
            events += map(json.loads, lines)
            if events and events[-1]["event"] == DONE:
                return events, None
            if not said:
                return events, _end_of(process, limit)


def _end_of(process: subprocess.Popen[bytes], limit: float) -> str:
    """How a process ended that says nothing more, in words."""
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"did not end within {limit:.0f} s"
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
