"""The benchmark of a layer beside a copy: its settings and its table; its times need a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from framework import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "shared_gpu_bench.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("shared_gpu_bench", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_settings_leave_some_to_others(bench):
    assert bench.settings_in_turn(132) == [0, 128, 124, 116, 100]


def test_the_table_shows_when_both_are_done(bench):
    rows = [
        bench.Row(0, 5000.0, 900.0, 5100.4, 3000.0),
        bench.Row(116, 5600.0, 900.0, 5650.0, 6000.0),
    ]
    first, second = bench.table(rows).splitlines()[2:]
    assert first == "| all | 5000 | 900 | 5100 | 3000 | 5100 |"
    assert second == "| 116 | 5600 | 900 | 5650 | 6000 | 6000 |"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_times_of_a_small_layer(bench, monkeypatch):
    monkeypatch.setattr(bench, "COPY_BYTES", 16 << 20)
    beside = bench.Beside(bench.Shape(512, 256, 128, 4, 2), bench.EngineName.HOPPER, rounds=2)
    row = beside.row(100)
    assert min(row.layer, row.copy, row.layer_beside, row.copy_beside) > 0
    assert torch.equal(beside._source, beside._target)
