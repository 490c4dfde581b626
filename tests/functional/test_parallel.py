"""DDP, FSDP2 and expert-parallel weights on two ranks: gradients and updated weights are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import framework
import pytest

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="the PyTorch face")
WORKER = Path(__file__).with_name("parallel_worker.py")


def test_two_ranks_train_like_one_process(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (out, err) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0 and out.endswith("equal\n"), err
