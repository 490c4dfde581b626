"""Every way in which somebody shards, offloads or wraps a layer or a part of it: the result is that of
the layer alone, or one sentence names the parameter and the module to wrap.
"""

from __future__ import annotations

import sys
from pathlib import Path

import framework
import pytest
from worlds import run_world

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="the PyTorch face")
WORKER = Path(__file__).with_name("parts_worker.py")


@pytest.mark.parametrize("face", ["layers", "transformers"])
def test_parts_work_or_name_what_to_wrap(tmp_path, face):
    for library in {"layers": ["accelerate"], "transformers": ["transformers", "peft"]}[face]:
        pytest.importorskip(library)
    outputs = run_world(lambda rank: [WORKER, rank, tmp_path / "store", face], [{}, {}])
    assert all(out.endswith("all\n") for out in outputs), sys.version
