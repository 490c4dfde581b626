"""Which full precision a run is compared with, on which engine, and that a resumed run keeps it."""

from __future__ import annotations

import numpy as np
import pytest
from small_run import SIZES, run_config

from ernie_compat import trainer as trainer_module
from ernie_compat.checkpoint import CheckpointError, read_header
from ernie_compat.learner import make_learner
from ernie_compat.metrics import StepResult
from ernie_compat.trainer import (
    CHECKPOINT_NAME,
    FULL_PRECISION,
    MAIN,
    Trainer,
)


class Recorded:
    """A learner that computes nothing and says which engine it was made for."""

    device = "cuda:0"

    def __init__(self, precision, engine, loss=2.0):
        self.precision, self.loss = precision, loss
        chosen = {"fp8": "hopper", "bf16": "bf16"}.get(precision, "reference")
        self.engine = chosen if engine == "auto" else engine

    def train_step(self, tokens, learning_rate):
        return StepResult(self.loss, 1.0, 1.0, 1.0, np.ones((1, SIZES.num_experts), dtype=np.int64))

    def evaluate(self, tokens):
        return self.loss

    def state(self):
        return {}

    load_state = state


@pytest.fixture
def gpu(monkeypatch):
    """As where `auto` is the Hopper engine for FP8 and the BF16 engine for bf16."""
    monkeypatch.setattr(
        trainer_module, "make_learner", lambda framework, model, train, precision, engine, parallel: Recorded(precision, engine)
    )  # fmt: skip


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("precision", "engine", "against", "wanted"),
    [
        ("fp8", "auto", None, ("bf16", "bf16")),
        ("fp8", "hopper", None, ("bf16", "bf16")),
        ("fp8", "hopper", "fp32", ("fp32", "reference")),
        ("fp8", "reference", None, ("fp32", "reference")),
        ("fp8", "reference", "bf16", ("bf16", "reference")),
        ("bf16", "auto", None, ("fp32", "reference")),
    ],
)
def test_baseline_and_its_engine(corpus, tmp_path, precision, engine, against, wanted):
    config = run_config(precision=precision, engine=engine, compare=True, against=against)
    trainer = Trainer.start(config, corpus, tmp_path)
    twin = trainer.learners[FULL_PRECISION]
    assert (twin.precision, twin.engine) == wanted and trainer.config.against == wanted[0]
    trainer.train()
    assert read_header(tmp_path / CHECKPOINT_NAME).config.against == wanted[0]
    summary = trainer.summary()
    assert (summary["against"], summary["engine_full_precision"]) == wanted
    assert summary["engine_used"] == trainer.learners[MAIN].engine and summary["engine"] == engine


def test_the_bf16_twin_is_the_bf16_run_and_times_are_its_own(corpus, tmp_path):
    alone = Trainer.start(run_config(precision="bf16"), corpus, tmp_path / "alone")
    compared = Trainer.start(
        run_config(compare=True, against="bf16"), corpus, tmp_path / "compared"
    )
    assert alone.train() and compared.train()
    assert [r.full_precision_loss for r in compared.records] == [r.loss for r in alone.records]
    assert all(r.full_precision_seconds > 0 and r.seconds > 0 for r in compared.records)
    summary, own = compared.summary(), alone.summary()
    assert summary["loss_end_full_precision"] == own["loss_end"] != summary["loss_end"]
    assert summary["held_out_loss_full_precision"] == own["held_out_loss"]
    of_twin = "loss_end_full_precision", "seconds_per_step_full_precision", "against"
    assert [own[name] for name in of_twin] == [None] * 3


def test_a_resumed_run_keeps_its_baseline(corpus, tmp_path):
    config = run_config(compare=True, against="bf16")
    first = Trainer.start(config, corpus, tmp_path)
    first.train(should_stop=lambda: first.step >= 3)
    assert Trainer.resume(run_config(compare=True), corpus, tmp_path).config.against == "bf16"
    with pytest.raises(CheckpointError, match="against = 'bf16', this run 'fp32'"):
        Trainer.resume(run_config(compare=True, against="fp32"), corpus, tmp_path)


@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp32"])
def test_the_engine_named_is_the_one_the_nodes_chose(precision):
    learner = make_learner("torch", SIZES, run_config().train, precision, "auto")
    chosen = {
        [*node._plan.in_force()._fits.values()][-1].chosen.name for node in learner.decoder.nodes
    }
    assert chosen == {learner.engine} == {"reference"}
