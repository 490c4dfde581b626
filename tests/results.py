"""Runs of pytest side by side: each writes down how it ended, and `python results.py FOLDER` says it of
all of them, last of all in the words with which pytest ends a run.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

# A folder; without it nothing is written down. And the name of a run.
FOLDER, STAGE = "SONICMOE_TEST_RESULTS", "SONICMOE_TEST_STAGE"


def closing_line(counts: dict[str, int], seconds: float) -> str:
    numbers = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{numbers or 'no tests ran'} in {seconds:.2f}s"


def write_down(counts: dict[str, int], seconds: float, not_run: list[str]) -> None:
    """What this run found, and in words what it left to others."""
    folder = os.environ.get(FOLDER)
    if folder:
        found = {"counts": counts, "seconds": seconds, "not_run": not_run}
        name = os.environ.get(STAGE, "pytest")
        (Path(folder) / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


def main(folder: str) -> int:
    found = {
        file.stem: json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))
    }
    for line in dict.fromkeys(line for run in found.values() for line in run["not_run"]):
        print(line)
    for name, run in found.items():
        print(f"{name}: {closing_line(run['counts'], run['seconds'])}")
    total = sum((Counter(run["counts"]) for run in found.values()), Counter())
    print(closing_line(total, max((run["seconds"] for run in found.values()), default=0.0)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
