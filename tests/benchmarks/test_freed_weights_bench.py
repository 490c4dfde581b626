"""The benchmark of freed weights runs where there is no GPU, counts the bytes that are held, and
refuses ways that differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import processes
import pytest
from worlds import environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "freed_weights_bench.py"
LAYERS, EXPERTS, HIDDEN, INNER = 2, 4, 64, 32  # of the tiny sizes
WEIGHTS = LAYERS * EXPERTS * 3 * HIDDEN * INNER / 2**20
SCALES = LAYERS * EXPERTS * 2 * 4 / 2**20  # every matrix fits into one block


def test_table_and_figures(tmp_path):
    command = [str(SCRIPT), "--check", "--layers", str(LAYERS), "--json", str(tmp_path / "f.json")]
    process = processes.run(command, environment(), ROOT, timeout=240)
    assert process.returncode == 0, process.stderr
    (shape,) = json.loads((tmp_path / "f.json").read_text())["figures"]
    ways = shape["ways"]
    assert len(process.stdout.strip().splitlines()) == 2 + 2 + len(ways)
    one = pytest.approx(WEIGHTS + SCALES)
    two = pytest.approx(2 * (WEIGHTS + SCALES))
    held = {
        name: (way["parameters"], way["forward"], way["backward"]) for name, way in ways.items()
    }
    kept = pytest.approx(2 * WEIGHTS)
    assert held == {
        "kept": (kept, two, two),
        "kept, iso_weight": (kept, one, one),
        "freed": (0, two, two),
        "freed, released": (0, two, one),
        "freed, iso_weight": (0, one, one),
    }
    assert all(way["event"] > 0 and way["step"] > 0 for way in ways.values())


def test_gradients_that_differ_end_it(monkeypatch):
    import torch

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, "freed_weights_bench", raising=False)
    import freed_weights_bench as bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    event = bench.Step.event

    def wrong(self):
        event(self)
        for copies in self._copies:
            if copies is not None:
                copies.weights.w1.scale_inv.mul_(1.001)

    monkeypatch.setattr(bench.Step, "event", wrong)
    variant = bench.Variant(bench.EngineName.REFERENCE, "perf")
    with pytest.raises(RuntimeError, match="gradients of 'freed' and 'kept' differ"):
        bench.measure(bench.TINY[0], variant, "cpu", 1, 1)
