"""The Triton engine in Triton's interpreter, against the reference engine: no GPU needed."""

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


def test_interpreted() -> None:
    checks = ["activations", "tiles", "modes", "bad_tokens", "targets", "no_rows"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "kernels.triton_engine_interpreted", *checks]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [
        line.split()[0] for line in done.stdout.splitlines() if line.endswith("checked")
    ] == checks
