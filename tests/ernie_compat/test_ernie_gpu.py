"""The main job on a GPU, small: FP8 on the Hopper engine beside BF16, launched without waiting, the
same bits again.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_run import SIZES, chosen_engines, run_config

from ernie_compat.model_config import node_config
from ernie_compat.trainer import FULL_PRECISION, MAIN, Trainer, backend
from sonicmoe.jit_warmup import warmup_jit

pytestmark = pytest.mark.gpu

E, H, I = 8, 512, 384
MODEL = replace(
    SIZES, hidden_size=H, num_layers=3, num_heads=4, num_experts=E, topk=4, intermediate_size=I,
    seq_len=128,
)  # fmt: skip
SCHEDULE = {"steps": 12, "batch_size": 8, "micro_batches": 2, "lr": 5e-4}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    for precision in ("fp8", "bf16"):
        assert warmup_jit(
            E, H, I, "cuda", config=node_config(precision, "auto"), jobs=os.cpu_count()
        ).complete


@pytest.fixture
def config():
    return run_config(model=MODEL, precision="fp8", engine="hopper", compare=True, train=SCHEDULE)


def test_compared_with_bf16_on_its_engine(config, corpus, tmp_path):
    trainer = Trainer.start(config, corpus, tmp_path)
    assert {name: learner.engine for name, learner in trainer.learners.items()} == {
        MAIN: "hopper", FULL_PRECISION: "bf16",
    }  # fmt: skip
    assert trainer.train()
    summary = trainer.summary()
    found = [summary[name] for name in ("engine_used", "against", "engine_full_precision")]
    assert found == ["hopper", "bf16", "bf16"]
    assert trainer.records[-1].loss < trainer.records[0].loss - 1.0
    assert 0 < summary["loss_gap"] < 0.03  # of a loss that still halves every few steps
    for name in (MAIN, FULL_PRECISION):
        assert chosen_engines(trainer.learners[name]) == {trainer.learners[name].engine}


def test_stopped_and_resumed_it_ends_with_the_same_bits(config, corpus, tmp_path):
    whole, first = (Trainer.start(config, corpus, tmp_path / name) for name in ("whole", "parts"))
    assert whole.train() and not first.train(should_stop=lambda: first.step >= 7)
    second = Trainer.resume(config, corpus, tmp_path / "parts")
    assert second.train()
    for ours, wanted in zip(second.records, whole.records, strict=True):
        assert (ours.loss, ours.full_precision_loss) == (wanted.loss, wanted.full_precision_loss)
    for name in (MAIN, FULL_PRECISION):
        states = [trainer.learners[name].state() for trainer in (second, whole)]
        assert [
            key for key in states[0] if not np.array_equal(states[0][key], states[1][key])
        ] == []


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_step_waits_for_nothing(config, corpus, precision):
    learner = backend("torch").Learner(MODEL, config.train, precision, "auto")
    tokens = corpus.batch(1, 8, MODEL.seq_len, 0)
    batches = [learner._inputs_and_targets(part) for part in np.split(tokens, 2)]
    for _ in range(3):
        learner.launch_step(batches, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        figures = [learner.launch_step(batches, 1e-3) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert figures[1][0] < figures[0][0]
