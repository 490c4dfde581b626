"""The benchmark of transformers models runs where there is no GPU, and its losses are those of one
model.
"""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest
from worlds import environment

pytest.importorskip("transformers", minversion="5.7")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "transformers_bench.py"


def test_blocks_and_losses(tmp_path):
    found = tmp_path / "f.json"
    command = [str(SCRIPT), "--device=cpu", "--rounds=1", "--steps=3", "--json", str(found)]
    process = processes.run(command, environment(), ROOT, timeout=240)
    assert process.returncode == 0, process.stderr
    figures = json.loads(found.read_text())
    names = {"grouped_mm", "sonicmoe", "sonicmoe_fp8"}
    assert set(figures["block"]) == set(figures["training"]) == names
    losses = {name: row["losses"] for name, row in figures["training"].items()}
    assert losses["sonicmoe"] == pytest.approx(losses["grouped_mm"], rel=1e-2)
    assert losses["sonicmoe_fp8"] == pytest.approx(losses["grouped_mm"], rel=2e-2)
    assert losses["sonicmoe_fp8"] != losses["sonicmoe"], "nothing was quantised"
