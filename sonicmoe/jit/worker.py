"""A compile worker process: `python -m sonicmoe.jit.worker`, driven over its standard streams by
`warmup`.

Not `multiprocessing`: its spawned children import the main module again, which is a training script
here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import unknown_flags
from .cache import CompileCache
from .child import search_path
from .errors import CompileError
from .plan import CompileJob


@dataclass(frozen=True)
class CacheSettings:
    """The arguments with which a worker opens the same cache."""

    root: Path
    local_root: Path
    lock_timeout_s: float
    trusted: bool = False


class Worker:
    """The parent's end of one worker process; used by one thread."""

    def __init__(self, settings: CacheSettings, inherited: Sequence[int] = ()) -> None:
        """A worker for `settings`; its process starts with the first job and keeps the `inherited`
        descriptors open until it ends.
        """
        self._settings, self._inherited = settings, tuple(inherited)
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, job: CompileJob) -> float:
        """Have the job's artefact published; returns seconds. CompileError where it failed, or the
        process died or did not start; the next job then gets a fresh process.
        """
        try:
            process = self._process = self._process or self._start()
        except OSError as error:
            raise CompileError(f"the worker compiling {job.name} did not start: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        try:
            # Every request carries the settings, so a process has no state that could be lost when
            # it is replaced. Jobs are dataclasses of this package; the pipe joins two processes of
            # the same user and the same code.
            pickle.dump((self._settings, job), process.stdin)
            process.stdin.flush()
            outcome = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._process = None
            raise CompileError(
                # A negative status names the signal, for example -9 where the kernel ran out of
                # memory and killed the compiler.
                f"the worker compiling {job.name} ended with status {process.wait()}"
            ) from None
        # A job or an answer that cannot be pickled leaves half a message in the pipe, so this
        # process cannot be used again.
        except Exception:
            self._process = None
            process.kill()
            process.communicate()  # closes the pipes
            raise
        # The process answers with text where the compile failed and stays usable, because only the
        # compile ended and not the process.
        if isinstance(outcome, str):
            raise CompileError(outcome)
        seconds: float = outcome
        return seconds

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            # End of file is the request to end; `serve` returns at it.
            process.stdin.close()
            process.wait()
            process.stdout.close()

    def kill(self) -> None:
        """End the process in the middle of its job, from another thread than that of `compile`,
        which then raises.
        """
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # The worker must import the same package as this process, which may come from a path that
        # only `sys.path` knows.
        command = [sys.executable, "-P", "-m", __name__]
        told = unknown_flags()  # this process has warned of them; its workers need not repeat it
        environment = {name: value for name, value in os.environ.items() if name not in told}
        environment["PYTHONPATH"] = search_path()
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            pass_fds=self._inherited,
        )  # fmt: skip


# One request at a time, in order: the parent has one thread per worker, and parallelism comes from
# several processes.
def serve() -> None:
    """Answer (settings, job) requests with seconds or an error message, to the end of the stream."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    # Compilers print to descriptor 1, which must not mix with the answers: answers go to a copy of
    # it, and descriptor 1 becomes stderr.
    os.dup2(2, 1)
    while True:
        try:
            settings, job = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_answer(settings, job), answers)
        answers.flush()


def _answer(settings: CacheSettings, job: Any) -> float | str:
    started = time.monotonic()
    cache = CompileCache(
        settings.root,
        settings.local_root,
        lock_timeout_s=settings.lock_timeout_s,
        trusted=settings.trusted,
        quiet=True,  # the parent has asked, and explained what it found
    )
    try:
        job.compile(cache)
    except Exception as error:
        return f"{job.name}: {type(error).__name__}: {error}"
    return time.monotonic() - started


if __name__ == "__main__":
    # Ctrl-C reaches every process of the terminal. The parent reports it, and its workers need not.
    with suppress(KeyboardInterrupt):
        serve()
