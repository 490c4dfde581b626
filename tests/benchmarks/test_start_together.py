"""Measuring processes begin together, and none is left behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from start_together import start_together  # noqa: E402

CHILD = """
import json, os, sys, time
time.sleep({wait})
print("ready", flush=True)
sys.stdin.readline()
print("noise")
print(json.dumps({{"at": time.monotonic(), "pid": os.getpid()}}))
sys.exit({code})
"""


def child(wait: float = 0.0, code: int = 0) -> list[str]:
    return [sys.executable, "-c", CHILD.format(wait=wait, code=code)]


def test_all_begin_when_the_last_one_is_ready() -> None:
    before = time.monotonic()
    started, results = start_together([child(), child(wait=0.5)], os.environ)
    assert started - before >= 0.5
    assert all(result["at"] >= started for result in results)
    assert len({result["pid"] for result in results}) == 2


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ([child(), [sys.executable, "-c", "pass"]], "ended before it was ready"),
        ([child(), child(code=3)], "a measuring process failed"),
    ],
)
def test_a_failure_is_told_and_leaves_no_process(commands: list[list[str]], words: str) -> None:
    with pytest.raises(click.ClickException, match=words):
        start_together(commands, os.environ)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists():
        running = [Path(f"/proc/{pid}/cmdline") for pid in children.read_text().split()]
        assert not [path for path in running if b"noise" in path.read_bytes()]
