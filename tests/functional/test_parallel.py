"""DDP, FSDP2 and expert-parallel weights on two ranks: gradients and updated weights are those of
one process.
"""

from __future__ import annotations

from pathlib import Path

import framework
import pytest
from worlds import run_world

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="the PyTorch face")
WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.trained
def test_two_ranks_train_like_one_process(tmp_path):
    outputs = run_world(lambda rank: [WORKER, rank, tmp_path / "store"], [{}, {}])
    assert all(out.endswith("equal\n") for out in outputs)
