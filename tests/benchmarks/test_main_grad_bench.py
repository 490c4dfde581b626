"""The benchmark of gradients that live once runs where there is no GPU, compares both ways before it
times them, and writes down what it promises.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import processes
import pytest
from worlds import environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "main_grad_bench.py"
EXPERTS, HIDDEN, INNER = 4, 32, 16  # of the tiny sizes
ACCUMULATORS = 4 * EXPERTS * 3 * HIDDEN * INNER / 2**20


def run(*options):
    command = [str(SCRIPT), "--check", "--rounds", "1", *options]
    return processes.run(command, environment(), ROOT, timeout=240)


def test_tables_and_figures(tmp_path):
    process = run("--json", str(tmp_path / "figures.json"))
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.strip().split("\n\n")[1:]
    assert len(first.splitlines()) == 2 + 2 * 3 and len(second.splitlines()) == 2 + 2 * 2
    every = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert [each["arrangement"] for each in every] == ["own", "stacked"]
    for each in every:
        direct, step = each["auto"], each["step"]
        assert (direct["held"], step["held"]) == (0, pytest.approx(ACCUMULATORS))
        assert list(direct["steps"]) == list(step["steps"]) == ["1", "4", "16"]
        assert min(*direct["steps"].values(), *step["steps"].values()) > 0
        assert 0 < direct["host"] < step["host"], "step() has nothing to hand over"


def test_gradients_that_differ_end_it(monkeypatch):
    """It times nothing where one of the ways is wrong."""
    import torch

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, "main_grad_bench", raising=False)
    import main_grad_bench as bench

    from sonicmoe.engine.targets import ParameterTargets

    add = ParameterTargets.add

    def wrong(self, name, expert, gradient):
        add(self, name, expert, gradient * (1 + 1e-3))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    variant = bench.Variant(bench.EngineName.REFERENCE, "perf")
    experts = bench.Experts(bench.TINY[0], "own", variant, "cpu")
    batches = bench.rotating_batches(bench.TINY[0], "cpu")
    for count in (1, 3):
        bench.compare(experts, batches, count)
    monkeypatch.setattr(ParameterTargets, "add", wrong)
    for count in (1, 3):
        with pytest.raises(RuntimeError, match="gradients of the two ways differ by"):
            bench.compare(experts, batches, count)
