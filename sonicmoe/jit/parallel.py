"""Compiles many kernels at once: in worker processes, within the places of the host, and together
with the other ranks that need the same kernels.

Every rank takes the longest kernel that nobody compiles, and at the end waits for those that others
compile. A rank that dies loses its claims, and another one takes its kernels over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cache import CompileCache
from .errors import CompileError
from .plan import CompileJob
from .slots import Held, HostSlots
from .worker import CacheSettings, Worker

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


class Outcomes:
    """Outcomes of several threads. `trouble` is an exception that `progress` raised. It is kept for
    the end, because it would otherwise end the thread that compiles.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        """Nothing yet; `progress` is called once per outcome, from one thread at a time."""
        self.outcomes: list[KernelOutcome] = []
        self.trouble: BaseException | None = None
        self._progress = progress
        self._mutex = threading.Lock()

    def add(self, outcome: KernelOutcome) -> None:
        with self._mutex:
            self.outcomes.append(outcome)
            if self._progress and self.trouble is None:
                try:
                    # `BaseException`, because Ctrl-C may arrive inside the callback; it is raised
                    # again after the workers have ended.
                    self._progress(outcome)
                except BaseException as error:
                    self.trouble = error


def longest_first(jobs: Sequence[CompileJob]) -> list[CompileJob]:
    """The order that ends soonest: a long job that starts last would run alone at the end."""
    return sorted(jobs, key=lambda job: -job.effort_s)


class ParallelBuild:
    """One process's part in building `jobs`, of which none is in the cache when it begins."""

    def __init__(
        self,
        jobs: Sequence[CompileJob],
        cache: CompileCache,
        slots: HostSlots,
        collected: Outcomes,
    ) -> None:
        """Nothing starts yet. `jobs` are distinct, and `collected` gets one outcome for each."""
        self._cache, self._slots, self._collected = cache, slots, collected
        self._settings = CacheSettings(
            cache.root, cache.local_root, cache.lock_timeout_s, cache.trusted
        )
        self._pending = longest_first(jobs)
        # Asked for at every look around, and a key hashes source files.
        self._keys = {job: job.key() for job in jobs}
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()
        self._mutex = threading.Lock()

    def run(self) -> None:
        """Build, until every job has an outcome."""
        if self._pending:
            self._cache.ask()
        try:
            self._run()
        except BaseException:  # Ctrl-C: the program ends now and not after the longest compile
            with self._mutex:
                self._pending.clear()
                workers = list(self._workers)
            for worker in workers:
                worker.kill()
            raise

    def _run(self) -> None:
        progress_at, last = time.monotonic(), len(self._pending)
        while True:
            self._settle_published()
            self._start_threads()
            with self._mutex:
                pending = len(self._pending)
            if not pending and not any(thread.is_alive() for thread in self._threads):
                return
            if pending != last or any(thread.is_alive() for thread in self._threads):
                progress_at, last = time.monotonic(), pending
            elif time.monotonic() - progress_at > self._cache.lock_timeout_s:
                self._give_up()
            self._pause()

    def _pause(self) -> None:
        """Wait a moment, or until a thread of this process ends."""
        alive = [thread for thread in self._threads if thread.is_alive()]
        if alive:
            alive[0].join(_POLL_S)
        else:
            time.sleep(_POLL_S)

    def _settle_published(self) -> None:
        """Note the kernels that other processes have published since the last look."""
        with self._mutex:
            pending = list(self._pending)
        for job in pending:
            if self._cache.try_load(self._keys[job]) is None:
                continue
            with self._mutex:
                if job not in self._pending:  # a thread of this process has taken it meanwhile
                    continue
                self._pending.remove(job)
            self._collected.add(KernelOutcome(job.name, str(self._keys[job]), CACHED, 0.0))

    def _start_threads(self) -> None:
        """A thread with a worker process for every place that is free and every job that is."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while len(self._threads) < self._slots.count:
            taken = self._take()
            if taken is None:
                return
            slot = self._slots.take()
            if slot is None:
                self._put_back(*taken)
                return
            # A thread per worker process: it only waits on a pipe, so the interpreter lock does not
            # hold the compilers back.
            thread = threading.Thread(target=self._work, args=(slot, *taken))
            try:
                thread.start()
            except RuntimeError:  # no more threads for this user: those there are do the work
                slot.release()
                self._put_back(*taken)
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _take(self) -> tuple[CompileJob, Held] | None:
        """The longest job that nobody else compiles, claimed, or None."""
        with self._mutex:
            for job in self._pending:
                key = self._keys[job]
                claim = self._slots.claim(key.digest)
                if claim is None:
                    continue
                # Another host, or a worker whose rank was killed, may be at it. Or another rank has
                # just published it, and the coordinating thread will see that.
                if self._cache.is_being_built(key) or self._cache.try_load(key) is not None:
                    claim.release()
                    continue
                self._pending.remove(job)
                return job, claim
        return None

    def _put_back(self, job: CompileJob, claim: Held) -> None:
        claim.release()
        with self._mutex:
            self._pending = longest_first([*self._pending, job])

    def _work(self, slot: Held, job: CompileJob, claim: Held) -> None:
        """Compile this job, and others as long as there are some, in one worker process."""
        worker = Worker(self._settings, slot.descriptors)
        with self._mutex:
            self._workers.add(worker)
        taken: tuple[CompileJob, Held] | None = (job, claim)
        try:
            while taken is not None:
                job, claim = taken
                try:
                    outcome = compile_one(worker, job, str(self._keys[job]))
                finally:
                    claim.release()
                self._collected.add(outcome)
                taken = self._take()
        finally:
            worker.close()
            slot.release()

    def _give_up(self) -> None:
        """Fail the jobs for whose builders this process has waited too long."""
        with self._mutex:
            waited, self._pending = self._pending, []
        for job in waited:
            key = self._keys[job]
            message = self._cache.waited_too_long(key)
            self._collected.add(KernelOutcome(job.name, str(key), FAILED, 0.0, message))


def compile_one(worker: Worker, job: CompileJob, key: str) -> KernelOutcome:
    """Have a worker compile one job; a failure is an outcome."""
    try:
        return KernelOutcome(job.name, key, BUILT, worker.compile(job))
    except CompileError as error:
        return KernelOutcome(job.name, key, FAILED, 0.0, str(error))
    # Any other exception would end this thread, and leave the jobs that it has not reached undone.
    except Exception as error:
        message = f"{job.name}: {type(error).__name__}: {error}"
        return KernelOutcome(job.name, key, FAILED, 0.0, message)
