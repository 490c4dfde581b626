"""The benchmark of PaddleFleet's flow runs where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest
from worlds import environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "fleet_bench.py"


def test_figures():
    command = [str(SCRIPT), "--device", "cpu", "--ranks", "2", "--repeats", "1", "--json"]
    process = processes.run(command, environment(), ROOT, timeout=240)
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout.splitlines()[-1])
    assert figures["ranks"] == 2 and "host_us" not in figures
    errors = figures["errors"]
    assert set(errors) == {"bf16 dispatch", "fp8 dispatch"}
    assert errors["fp8 dispatch"]["y"] == errors["bf16 dispatch"]["y"], "the same codes"
    for arm, stages in figures["stages_us"].items():
        total = stages.pop("total")
        assert len(stages) == 6 and min(stages.values()) > 0, arm
        assert total == pytest.approx(sum(stages.values()))
