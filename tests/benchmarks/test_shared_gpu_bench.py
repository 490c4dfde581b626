"""The benchmark of a layer beside a copy: its settings and its table; its times need a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

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
