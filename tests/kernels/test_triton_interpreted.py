"""The Triton kernels in Triton's interpreter, which needs no GPU: those of routing against plain
tensor operations, bit for bit, and those of the engine against the reference engine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from framework import IS_PADDLE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(IS_PADDLE, reason="the interpreter runs on PyTorch tensors"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


CHECKS = {
    "interpreted": ["metadata_and_slot_values", "counts_too_small", "aggregation", "conversions"],
    "triton_engine_interpreted": [
        "activations", "tiles", "modes", "bad_tokens", "targets", "no_rows",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("module", "checks"), CHECKS.items(), ids=CHECKS)
def test_interpreted(module: str, checks: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    own = {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", f"kernels.{module}", *checks]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.endswith("checked")]
    assert [line.split()[0] for line in told] == checks
