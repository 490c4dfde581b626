"""The benchmark of a layer beside a copy moves what it says, and times all four."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "shared_gpu_bench.py"


@pytest.mark.parametrize("engine", ["hopper", "bf16"])
def test_times_of_a_small_layer(engine, monkeypatch):
    spec = importlib.util.spec_from_file_location("shared_gpu_bench", SCRIPT)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, bench)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "COPY_BYTES", 16 << 20)
    beside = bench.Beside(bench.Shape(512, 256, 128, 4, 2), bench.EngineName(engine), rounds=2)
    row = beside.row(100)
    assert min(row.layer, row.copy, row.layer_beside, row.copy_beside) > 0
    assert torch.equal(beside._source, beside._target)
