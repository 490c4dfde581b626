"""Compiles many kernels at once: in worker processes, within the places of the host, and together
with the other ranks that need the same kernels.

Every rank takes the longest kernel that nobody compiles, and at the end waits for those that others
compile. A rank that dies loses its claims, and another one takes its kernels over.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .cache import CompileCache
from .plan import CompileJob
from .slots import Held, HostSlots
from .worker import start

BUILT, CACHED, FAILED, MISSING = "built", "cached", "failed", "missing"
_POLL_S = 0.1


@dataclass(frozen=True)
class KernelOutcome:
    """The result of one job; `state`: built, cached, failed or missing; `seconds`: compile time."""

    kernel: str
    key: str
    state: str
    seconds: float
    message: str = ""


Progress = Callable[[KernelOutcome], None]


class ParallelBuild:
    """One process's part in building `jobs`, of which none is in the cache when it begins."""

    def __init__(self, jobs: Sequence[CompileJob], cache: CompileCache, slots: HostSlots) -> None:
        """Nothing starts yet. `jobs` are distinct."""
        self._cache, self._slots = cache, slots
        # A long job that starts last would run alone at the end.
        self._pending = sorted(jobs, key=lambda job: -job.effort_s)
        # Asked for at every look around, and a key hashes source files.
        self._keys = {job: job.key() for job in jobs}
        self._running: list[_Compile] = []

    def run(self) -> Iterator[KernelOutcome]:
        """Build, until every job has an outcome, and yield each as it comes. A caller that stops
        asking ends the compiles that run.
        """
        if self._pending:
            self._cache.ask()
        try:
            yield from self._run()
        finally:  # Ctrl-C: the program ends now and not after the longest compile
            for running in self._running:
                running.process.kill()
                running.process.communicate()
                running.release()

    def _run(self) -> Iterator[KernelOutcome]:
        waiting_since = time.monotonic()
        while self._pending or self._running:
            before = len(self._pending)
            yield from self._published()
            yield from self._start()
            if self._running or len(self._pending) != before:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > self._cache.lock_timeout_s:
                yield from self._given_up()
            yield from self._answers()

    def _published(self) -> Iterator[KernelOutcome]:
        """The kernels that other processes have published since the last look."""
        for job in list(self._pending):
            key = self._keys[job]
            if self._cache.try_load(key) is not None:
                self._pending.remove(job)
                yield KernelOutcome(job.name, str(key), CACHED, 0.0)

    def _start(self) -> Iterator[KernelOutcome]:
        """Start a worker process for every place that is free and every job that is; the outcomes
        of those that do not start.
        """
        while self._pending and len(self._running) < self._slots.count:
            slot = self._slots.take()
            if slot is None:
                return
            taken = self._take()
            if taken is None:
                slot.release()
                return
            job, claim = taken
            held, key = (claim, slot), str(self._keys[job])
            try:
                worker = start(self._cache.settings, job, slot.descriptors)
                self._running.append(_Compile(job, key, worker, held))
            # A job that cannot be pickled, or a host that has no more processes.
            except Exception as error:
                for each in held:
                    each.release()
                message = f"{job.name}: {type(error).__name__}: {error}"
                yield KernelOutcome(job.name, key, FAILED, 0.0, message)

    def _take(self) -> tuple[CompileJob, Held] | None:
        """The longest job that nobody else compiles, claimed, or None."""
        for job in self._pending:
            key = self._keys[job]
            claim = self._slots.claim(key.digest)
            if claim is None:
                continue
            # Another host, or a worker whose rank was killed, may be at it. Or another rank has
            # just published it, and the next look around will see that.
            if self._cache.is_being_built(key) or self._cache.try_load(key) is not None:
                claim.release()
                continue
            self._pending.remove(job)
            return job, claim
        return None

    def _answers(self) -> Iterator[KernelOutcome]:
        """The outcomes of workers that have answered, after a moment at most."""
        with selectors.DefaultSelector() as outputs:
            for running in self._running:
                assert running.process.stdout is not None
                outputs.register(running.process.stdout, selectors.EVENT_READ, running)
            answered: list[_Compile] = [key.data for key, _ in outputs.select(_POLL_S)]
        for running in answered:
            outcome = running.outcome()
            self._running.remove(running)
            running.release()
            yield outcome

    def _given_up(self) -> Iterator[KernelOutcome]:
        """Failures of the jobs for whose builders this process has waited too long."""
        waited, self._pending = self._pending, []
        for job in waited:
            key = self._keys[job]
            message = self._cache.waited_too_long(key)
            yield KernelOutcome(job.name, str(key), FAILED, 0.0, message)


@dataclass(frozen=True, eq=False)
class _Compile:
    """A job in its worker process; `held`: its claim and its place."""

    job: CompileJob
    key: str
    process: subprocess.Popen[bytes]
    held: tuple[Held, ...]

    def outcome(self) -> KernelOutcome:
        """What the worker said; waits for its end."""
        said, _ = self.process.communicate()
        name = self.job.name
        if self.process.returncode != 0 or not said:
            # A negative status names the signal, for example -9 where the system ran out of memory.
            message = f"the worker compiling {name} ended with status {self.process.returncode}"
            return KernelOutcome(name, self.key, FAILED, 0.0, message)
        answer = json.loads(said)
        return KernelOutcome(
            name,
            self.key,
            FAILED if answer["message"] else BUILT,
            answer["seconds"],
            answer["message"],
        )

    def release(self) -> None:
        for each in self.held:
            each.release()
