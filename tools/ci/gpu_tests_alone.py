#!/usr/bin/env python3
"""Run the GPU tests one by one, each in a process of its own with empty caches.

    tools/ci/gpu_tests_alone.py                          # every test, 4 processes at once
    tools/ci/gpu_tests_alone.py --by file --jobs 2       # a process per file: less compiling
    tools/ci/gpu_tests_alone.py --by class tests/gpu/test_hopper_node_gpu.py

In a whole run a test may find kernels that another one has compiled, or what another one left in
the process. Alone it finds neither. A line per group says how it ended and how long it took; the
output of those that failed follows. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Without the options of pyproject.toml: a second -q changes how collected tests are listed.
PYTEST = (
    sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider",
)  # fmt: skip
# Where kernels, and what compilers keep, lie when nobody says otherwise.
CACHES = ("XDG_CACHE_HOME", "TMPDIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Outcome:
    """How a group of tests ended: `passed`, `failed`, `skipped` or `too long`."""

    group: str
    ending: str
    seconds: float
    output: str


def collect(root: Path, selected: list[str]) -> list[str]:
    """Node ids of the tests below these paths, which begin at `root`.

    Raises:
        SystemExit: pytest cannot collect them; its output says why.
    """
    result = subprocess.run(
        [*PYTEST, f"--rootdir={root}", "--collect-only", *selected], cwd=root, capture_output=True, text=True, check=False
    )  # fmt: skip
    if result.returncode not in (0, NOTHING_COLLECTED):
        raise SystemExit(result.stdout + result.stderr)
    return [line for line in result.stdout.splitlines() if "::" in line]


def grouped(tests: Iterable[str], by: str) -> list[str]:
    """What one process runs, in the order of the tests: node ids, classes or files."""
    return list(dict.fromkeys(_group(test, by) for test in tests))


def _group(test: str, by: str) -> str:
    if by == "test":
        return test
    # Parameters may contain "::", so they are cut off before the parts are counted.
    path, name, *_ = re.sub(r"\[.*", "", test).split("::")
    return path if by == "file" else f"{path}::{name}"


def run_alone(root: Path, group: str, timeout: float) -> Outcome:
    """The tests of one group in a fresh process; its caches are removed afterwards."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-alone-") as caches:
        variables = {name: str(Path(caches) / name.lower()) for name in CACHES}
        for folder in variables.values():
            Path(folder).mkdir(mode=0o700)
        try:
            result = subprocess.run(
                [*PYTEST, f"--rootdir={root}", group], cwd=root, env={**os.environ, **variables},
                capture_output=True, text=True, check=False, timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode(errors="replace") if error.stdout else ""
            return Outcome(group, "too long", time.monotonic() - started, output)
    ending = "failed" if result.returncode else "passed"
    if not result.returncode and not re.search(r"\d+ passed", result.stdout):
        ending = "skipped"
    return Outcome(group, ending, time.monotonic() - started, result.stdout + result.stderr)


def outcomes(root: Path, groups: list[str], jobs: int, timeout: float) -> Iterator[Outcome]:
    """Of every group, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda group: run_alone(root, group, timeout), groups)


def main() -> int:
    """Run, and print a line per group; then the failures, and a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="paths or node ids")
    parser.add_argument("--by", choices=("test", "class", "file"), default="test")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once (4)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a group (900)")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the paths (this checkout)")
    options = parser.parse_args()
    groups = grouped(collect(options.root, options.tests), options.by)
    started, found = time.monotonic(), []
    for outcome in outcomes(options.root, groups, max(1, options.jobs), options.timeout):
        print(f"{outcome.ending:<9} {outcome.seconds:7.1f} s  {outcome.group}", flush=True)
        found.append(outcome)
    bad = [outcome for outcome in found if outcome.ending in ("failed", "too long")]
    for outcome in bad:
        print(f"\n==== {outcome.group}: {outcome.ending}\n{outcome.output[-6000:]}")
    counts = {each: sum(o.ending == each for o in found) for each in ("passed", "skipped")}
    print(
        f"\n{len(found)} groups in {time.monotonic() - started:.0f} s: {counts['passed']} passed, "
        f"{counts['skipped']} skipped, {len(bad)} failed"
    )
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
