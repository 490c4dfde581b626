"""Starting racers and collecting what they say."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RACER = Path(__file__).with_name("racer.py")
PACKAGE_ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
NOT_RUN = "NOT RUN: "  # begins the reason of a skip that the summary repeats


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGE_ROOT), str(RACER.parent)])
    return {**os.environ, "PYTHONPATH": path, **more}


@dataclass
class Racer:
    process: subprocess.Popen[str]

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, f"status {self.process.returncode}\n{out}\n{err}"
        return {**json.loads(out), "log": err}

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def held(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Inside, a process holds a lock file, which knows nothing of the cache and never ends by
    itself.
    """
    program = "import fcntl,sys,time; f=open(sys.argv[1],'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(60)"
    lock.parent.mkdir(parents=True, exist_ok=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


class Field:
    """A cache directory, a node-local one, and the log of builds, for racers to meet on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root, self.local, self.log = folder / "cache", folder / "local", folder / "builds.log"
        self._numbers = itertools.count()

    def start(
        self, *, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None, **request: Any
    ) -> Racer:
        places = {"root": self.root, "local": self.local, "log": self.log}
        request = {name: str(path) for name, path in places.items()} | request
        path = self.folder / f"request-{next(self._numbers)}.json"
        path.write_text(json.dumps(request))
        return Racer(
            subprocess.Popen(
                [*prefix, sys.executable, str(RACER), str(path)], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env=environment(**(env or {})),
            )
        )  # fmt: skip

    def run(self, **request: Any) -> dict[str, Any]:
        return self.start(**request).result()

    def race(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start all, let them go at one moment, and wait for all."""
        ready, go = self.folder / "ready", self.folder / "go"
        shutil.rmtree(ready, ignore_errors=True)
        go.unlink(missing_ok=True)
        ready.mkdir()
        racers = [self.start(ready=str(ready), go=str(go), **request) for request in requests]
        self.until(lambda: len(list(ready.iterdir())) == len(racers))
        go.touch()
        return [racer.result() for racer in racers]

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
