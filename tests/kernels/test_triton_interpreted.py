"""The Triton kernels in Triton's interpreter, which needs no GPU: those of routing against plain
tensor operations, bit for bit, and those of the engine against the reference engine.
"""

from __future__ import annotations

import importlib.util

import processes
import pytest
from framework import IS_PADDLE

pytestmark = [
    pytest.mark.kernels,  # kernels_due.py knows what it runs, which takes half a minute
    pytest.mark.skipif(IS_PADDLE, reason="the interpreter runs on PyTorch tensors"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
CHECKS = {
    "interpreted": ["metadata_and_slot_values", "counts_too_small", "sorted_rows", "aggregation"],
    "triton_engine_interpreted": ["cases", "tiles"],
}


@pytest.mark.parametrize(("module", "checks"), CHECKS.items(), ids=CHECKS)
def test_interpreted(module: str, checks: list[str]) -> None:
    done = processes.of_checkout("-m", f"kernels.{module}", *checks, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.endswith("checked")]
    assert [line.split()[0] for line in told] == checks
