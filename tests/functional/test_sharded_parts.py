"""Every way in which somebody shards, offloads or wraps a layer or a part of it: the result is that of
the layer alone, or one sentence names the parameter and the module to wrap. And under DDP, FSDP2 and
with a node two ranks train like one process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import framework
import pytest
from worlds import run_world

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="the PyTorch face")
WORKER = Path(__file__).with_name("parts_worker.py")
NEEDS = {"layers": ["accelerate", "peft"], "transformers": ["transformers", "peft"]}


@pytest.mark.trained
def test_parts_work_or_name_what_to_wrap_and_two_ranks_train_like_one_process(tmp_path):
    tables = [table for table, libraries in NEEDS.items() if all(map(find_spec, libraries))]
    (out,) = run_world(lambda _: [WORKER, tmp_path / "store", *tables], [{}])
    assert out.endswith("all\n")
