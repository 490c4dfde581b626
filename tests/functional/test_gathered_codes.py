"""FSDP2 gathers the codes of experts: to the bit what it computes on gathered values."""

from __future__ import annotations

from pathlib import Path

import framework
import pytest
from worlds import run_world

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="the PyTorch face")
WORKER = Path(__file__).with_name("coded_worker.py")
EAGER = (
    *("kept", "resharded", "uneven", "fewer", "masters", "checkpointed", "accumulated"),
    *("offloaded", "on meta", "assigned", "functional", "gate and up apart", "values"),
)


def run(tmp_path, ranks, *ways):
    outputs = run_world(
        lambda rank: [WORKER, rank, tmp_path / "store", ranks, *ways], [{} for _ in range(ranks)]
    )
    assert all(out.endswith("equal\n") for out in outputs)


@pytest.mark.trained
def test_two_ranks_train_as_on_gathered_values(tmp_path):
    run(tmp_path, 2, *EAGER)


@pytest.mark.trained
def test_four_ranks(tmp_path):
    """Five experts: 2, 2, 1 and none; and two copies of two shards each."""
    run(tmp_path, 4, "uneven", "fewer", "hybrid")


@pytest.mark.trained
def test_a_compiled_layer(tmp_path):
    run(tmp_path, 2, "compiled")


@pytest.mark.trained
@pytest.mark.parametrize(("way", "needs"), [("LoRA", "peft"), ("qwen3", "transformers"), ("gpt-oss", "transformers")])  # fmt: skip
def test_models(tmp_path, way, needs):
    pytest.importorskip(needs)
    run(tmp_path, 2, way)
