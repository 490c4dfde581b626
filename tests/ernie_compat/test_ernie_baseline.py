"""Which full precision a run is compared with, on which engine, and that a resumed run keeps it."""

from __future__ import annotations

import pytest
from small_run import SIZES, run_config

from ernie_compat.checkpoint import CheckpointError, read_header
from ernie_compat.trainer import CHECKPOINT_NAME, FULL_PRECISION, Trainer, backend, baseline_for


@pytest.mark.parametrize(
    ("precision", "against", "wanted"),
    [("fp8", None, "fp32"), ("fp8", "bf16", "bf16"), ("bf16", None, "fp32")],
)
def test_baseline_and_its_engine(corpus, tmp_path, precision, against, wanted):
    config = run_config(precision=precision, compare=True, against=against, train={"steps": 1})
    trainer = Trainer.start(config, corpus, tmp_path)
    assert trainer.learners[FULL_PRECISION].precision == wanted == trainer.config.against
    trainer.train()
    assert read_header(tmp_path / CHECKPOINT_NAME).config.against == wanted
    summary = trainer.summary()
    assert (summary["config"]["against"], summary["engine_full_precision"]) == (wanted, "reference")
    # test_ernie_gpu.py has the twin on a GPU.
    assert [baseline_for(engine) for engine in ("hopper", "triton")] == ["bf16", "fp32"]


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
    of_twin = "loss_end_full_precision", "seconds_per_step_full_precision"
    assert [own[name] for name in of_twin] == [None] * 2


def test_a_resumed_run_keeps_its_baseline(corpus, tmp_path):
    config = run_config(compare=True, against="bf16")
    first = Trainer.start(config, corpus, tmp_path)
    first.train(should_stop=lambda: first.step >= 3)
    assert Trainer.resume(run_config(compare=True), corpus, tmp_path).config.against == "bf16"
    with pytest.raises(CheckpointError, match="against = 'bf16', this run 'fp32'"):
        Trainer.resume(run_config(compare=True, against="fp32"), corpus, tmp_path)


@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp32"])
def test_the_engine_named_is_the_one_the_nodes_chose(precision):
    learner = backend("torch").Learner(SIZES, run_config().train, precision, "auto")
    chosen = {
        node._plan.fitted_to_weight(node._state.parameters.parameters()[0]).chosen.name
        for node in learner.decoder.nodes
    }
    assert chosen == {learner.engine} == {"reference"}
