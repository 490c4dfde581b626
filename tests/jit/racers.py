"""Processes that meet on one cache, and what they say."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import racer

NOT_RUN = "NOT RUN: "  # begins the reason of a skip that the summary repeats


class Racer(forks.Child):
    def result(self) -> dict[str, Any]:
        answer, said = self.answer()
        assert isinstance(answer, dict), answer
        return {**answer, "log": said}


@contextmanager
def held(lock: Path) -> Iterator[int]:
    """Inside, a process holds a lock file, which knows nothing of the cache and never ends by
    itself: its id.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        holder = forks.start(signal.pause)  # shares the open file, and so the lock
    try:
        yield holder
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


class Field:
    """A cache directory, a node-local one, and the log of builds, for racers to meet on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root, self.local, self.log = folder / "cache", folder / "local", folder / "builds.log"

    def start(self, *, mounts: str | None = None, **request: Any) -> Racer:
        """A process that runs `racer.race`."""
        places = self.root, self.local, self.log
        return Racer(lambda: racer.race(*places, **request), mounts=mounts)

    def run(self, **request: Any) -> dict[str, Any]:
        return self.start(**request).result()

    def race(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start all, let them go at one moment, and wait for all."""
        go = self.folder / "go"
        go.unlink(missing_ok=True)
        racers = [self.start(go=go, **request) for request in requests]
        time.sleep(0.2)  # until they stand and wait
        go.touch()
        return [each.result() for each in racers]

    def builds(self) -> Counter[int]:
        """How often each size was built."""
        if not self.log.exists():
            return Counter()
        return Counter(int(line.split()[0]) for line in self.log.read_text().splitlines())

    @staticmethod
    def until(condition: Any, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.005)
