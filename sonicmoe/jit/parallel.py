"""Compiles many kernels at once, together with the other ranks that need the same kernels.

Each compile runs in a process of its own, for which a thread of this process waits. A thread takes
the longest kernel that is left, and puts it back while another rank compiles it: the lock of the key
decides. A rank that dies loses its locks, and another one takes its kernels over.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from .cache import CompileCache
from .errors import CompileLockTimeout
from .plan import CompileJob

BUILT, CACHED, FAILED, MISSING = "built", "cached", "failed", "missing"
_POLL_S = 0.25


@dataclass(frozen=True)
class KernelOutcome:
    """The result of one job; `state`: built, cached, failed or missing; `seconds`: compile time."""

    kernel: str
    key: str
    state: str
    seconds: float
    message: str = ""


Progress = Callable[[KernelOutcome], None]


def build_all(
    jobs: Sequence[CompileJob], cache: CompileCache, compilers: int
) -> Iterator[KernelOutcome]:
    """Build distinct jobs, `compilers` at once, and yield the outcome of each as it comes. After a
    caller that stops asking, no further compile begins.
    """
    if not jobs:
        return
    build = _ParallelBuild(jobs, cache)
    for _ in range(min(compilers, len(jobs))):
        # The caller's configuration says whether anything may be compiled; a new thread has none.
        inside = contextvars.copy_context()
        # Daemons: after Ctrl-C the program ends now, and not after the longest compile.
        threading.Thread(target=inside.run, args=(build.work,), daemon=True).start()
    try:
        for _ in jobs:
            yield build.outcomes.get()
    finally:
        build.ended = True


class _ParallelBuild:
    """One process's part in building `jobs`."""

    def __init__(self, jobs: Sequence[CompileJob], cache: CompileCache) -> None:
        self._cache = cache
        self._impatient = cache.impatient()
        # A key hashes source files.
        self._keys = {job: job.key() for job in jobs}
        # A long job that starts last would run alone at the end.
        self._pending = sorted(jobs, key=lambda job: job.effort_s)
        self._held_since: dict[CompileJob, float] = {}
        self.outcomes: SimpleQueue[KernelOutcome] = SimpleQueue()
        self.ended = False

    def work(self) -> None:
        """Build until nothing is pending. Several threads do this at once."""
        while self._pending and not self.ended:
            try:
                job = self._pending.pop()
            except IndexError:
                return
            outcome = self._built(job)
            if outcome is not None:
                self.outcomes.put(outcome)
            else:
                self._pending.insert(0, job)
                time.sleep(_POLL_S)

    def _built(self, job: CompileJob) -> KernelOutcome | None:
        """The outcome of a job; None while another process is at it."""
        started, key = time.monotonic(), self._keys[job]
        try:
            if self._impatient.try_load(key) is not None:
                return KernelOutcome(job.name, str(key), CACHED, 0.0)
            job.compile(self._impatient)
        except CompileLockTimeout:
            since = self._held_since.setdefault(job, started)
            if started - since <= self._cache.lock_timeout_s:
                return None
            message = self._cache.waited_too_long(key)
        # A thread that ended without an outcome would keep its caller waiting for ever.
        except BaseException as error:
            message = f"{job.name}: {type(error).__name__}: {error}"
        else:
            return KernelOutcome(job.name, str(key), BUILT, time.monotonic() - started)
        return KernelOutcome(job.name, str(key), FAILED, time.monotonic() - started, message)
