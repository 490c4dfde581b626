"""The benchmark of settings runs where there is no GPU, one row for each setting."""

from __future__ import annotations

import json
from pathlib import Path

import processes
from worlds import environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "settings_bench.py"


def test_a_row_for_each_setting():
    command = [str(SCRIPT), "--device", "cpu", "--rounds", "1", "--json"]
    process = processes.run(command, environment(), ROOT, timeout=240)
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout)
    assert next(iter(figures)) == "swiglu, z int8" and "situ_glu, z bf16" in figures
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in figures.values())
