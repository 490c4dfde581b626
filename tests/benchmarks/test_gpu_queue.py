"""Processes that share devices: how many at a time, what a time limit and a death do to them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import gpu_queue
import pytest
from gpu_queue import GpuQueue, Task

# Stands in for `sonicmoe`: says what it sees, waits, ends.
CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
print(sys.argv[3], repr(os.environ["CUDA_VISIBLE_DEVICES"]), flush=True)
time.sleep(float(sys.argv[3]))
sys.exit(int(sys.argv[4]))
"""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_queue, "_PROGRAM", CHILD)


def task(path: Path, name: str, wait: float = 0.0, code: int = 0, *more: str, alone=False) -> Task:
    return Task(name, (str(wait), str(code), *more), path / f"{name}.log", alone)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_slots_bound_what_runs_and_a_large_task_has_its_device_alone(tmp_path: Path) -> None:
    tasks = [task(tmp_path, f"small{n}", 0.3) for n in range(4)]
    tasks.append(task(tmp_path, "large", 0.5, alone=True))
    queue = GpuQueue(tasks, ["0", "1"], 2, os.environ, lambda line: None)
    seen: list[list[str]] = []
    outcomes = queue.run(soon(), on_wait=lambda: seen.append([t.name for t in queue.running]))
    assert all(one.state == "finished" for one in outcomes)
    assert max(map(len, seen)) == 3
    assert all(len(names) <= 3 for names in seen if "large" in names)
    beside = {(tmp_path / f"{name}.log").read_text().split()[1] for name in seen[0]}
    assert seen[0][0] == "large" and beside == {"'0'", "'1'"}


def test_the_time_limit_stops_what_runs_and_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_queue, "GRACE_S", 0.5)
    tasks = [task(tmp_path, "polite", 60), task(tmp_path, "deaf", 60, 0, "deaf")]
    tasks.append(task(tmp_path, "late"))
    began = time.monotonic()
    outcomes = GpuQueue(tasks, [""], 2, os.environ, lambda line: None).run(soon(1.5))
    assert time.monotonic() - began < 20
    assert [(one.state, one.code) for one in outcomes] == [
        ("stopped", -signal.SIGTERM),
        ("stopped", -signal.SIGKILL),
        ("not started", None),
    ]
