"""The loop on PyTorch: it learns, it is deterministic, and stopping it changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_run import SIZES, chosen_engines, run_config

from ernie_compat.checkpoint import CheckpointError, SavedRun, load_checkpoint
from ernie_compat.initial_weights import initial_weight
from ernie_compat.metrics import read_metrics
from ernie_compat.trainer import (
    CHECKPOINT_NAME,
    FULL_PRECISION,
    MAIN,
    METRICS_NAME,
    Trainer,
    TrainingError,
    baseline_for,
)


def trained(config, corpus, directory):
    trainer = Trainer.start(config, corpus, directory)
    assert trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run_of(corpus, tmp_path_factory):
    """`run_of(options of a run)`: its trainer, at the end of a run that tests share. They leave its
    files as they are.
    """
    made: dict[str, Trainer] = {}

    def run(**options):
        if (name := repr(options)) not in made:
            made[name] = trained(run_config(**options), corpus, tmp_path_factory.mktemp("run"))
        return made[name]

    return run


def losses_of(trainer):
    return [record.loss for record in trainer.records]


@pytest.mark.trained
def test_loss_falls_and_every_parameter_learns(corpus, tmp_path):
    config = run_config(precision="fp8", train={"steps": 40, "lr": 1e-2})
    trainer = trained(config, corpus, tmp_path)
    losses = losses_of(trainer)
    # Over 4 seeds and two orders of summation: within 0.033 of it; 3.07 to 3.20 below the start.
    assert losses[0] == pytest.approx(np.log(256), abs=0.15)
    assert np.mean(losses[-5:]) < losses[0] - 1.5
    learner = trainer.learners[MAIN]
    assert chosen_engines(learner) == {learner.engine} == {"reference"}
    final = learner.state()
    names = [key.removeprefix("weight/") for key in final if key.startswith("weight/")]
    for name in names:
        weight = final[f"weight/{name}"]
        initial = initial_weight(name, weight.shape, SIZES, config.train.seed)
        assert not np.array_equal(weight, initial), name
    assert len(names) == 22


@pytest.mark.trained
def test_precisions_differ_and_a_twin_is_the_run_of_its_precision(run_of, corpus):
    losses = {each: losses_of(run_of(precision=each)) for each in ("fp8", "bf16", "fp32")}
    compared = run_of(precision="fp8", compare=True)
    for against in ("bf16", "fp32"):
        run = compared if against == "fp32" else run_of(compare=True, against=against)
        assert [r.full_precision_loss for r in run.records] == losses[against]
        assert losses_of(run) == losses["fp8"]
        assert all(r.full_precision_seconds > 0 and r.seconds > 0 for r in run.records)
        summary, own = run.summary(), run_of(precision=against).summary()
        assert summary["config"]["against"] == run.learners[FULL_PRECISION].precision == against
        assert summary["loss_end_full_precision"] == own["loss_end"] != summary["loss_end"]
        assert summary["held_out_loss_full_precision"] == own["held_out_loss"]
        assert own["loss_end_full_precision"] is own["seconds_per_step_full_precision"] is None
        # A resumed run keeps it, as its checkpoint has it.
        resumed = Trainer.resume(run_config(compare=True), corpus, run.directory)
        assert resumed.config.against == against
    # test_ernie_gpu.py has the twin on a GPU.
    assert [baseline_for(engine) for engine in ("hopper", "triton")] == ["bf16", "fp32"]
    assert len(set(map(tuple, losses.values()))) == 3
    firsts = [each[0] for each in losses.values()]
    # Over 4 seeds and two orders of summation: at most 5.4e-4, and gaps of 1.2e-5 to 5.1e-5.
    assert max(firsts) - min(firsts) < 5e-3
    assert 0 < compared.summary()["loss_gap"] < 1e-3


@pytest.mark.trained
def test_micro_batches_accumulate_to_the_whole_batch(run_of):
    # The balance loss is a product of two batch means, so it alone depends on the split.
    model = replace(SIZES, aux_loss_coef=0.0)
    one, four = (
        run_of(model=model, precision="fp32", train={"micro_batches": parts}) for parts in (1, 4)
    )
    # fp32 sums in another order: 9e-8 and 7e-7 over 4 seeds and two orders of summation.
    assert losses_of(four) == pytest.approx(losses_of(one), rel=1e-5)
    norms = ([r.grad_norm for r in trainer.records] for trainer in (four, one))
    assert next(norms) == pytest.approx(next(norms), rel=1e-4)


def test_non_finite_loss_stops_and_keeps_the_checkpoint(corpus, tmp_path):
    config = run_config(train={"checkpoint_every": 2})
    trainer = Trainer.start(config, corpus, tmp_path)

    def poison_after_three(record):
        if record.step == 3:
            trainer.learners[MAIN].decoder.lm_head.weight.data.fill_(float("nan"))

    with pytest.raises(
        TrainingError, match=r"step 4 of the main run: loss nan.*the last checkpoint is whole"
    ):
        trainer.train(on_step=poison_after_three)
    header, arrays = load_checkpoint(tmp_path / CHECKPOINT_NAME)
    assert header.step == 2 and all(np.isfinite(a).all() for a in arrays.values())
    # Steps after the checkpoint are repeated, and not kept twice.
    assert [record.step for record in read_metrics(tmp_path / METRICS_NAME)] == [1, 2, 3]
    assert Trainer.resume(config, corpus, tmp_path).train()
    assert [record.step for record in read_metrics(tmp_path / METRICS_NAME)] == [*range(1, 7)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": replace(SIZES, hidden_size=64)}, "hidden_size = 32, this run 64"),
        ({"precision": "bf16"}, "precision = 'fp8', this run 'bf16'"),
        ({"against": "bf16"}, "against = None, this run 'bf16'"),
        ({"train": {"seed": 5}}, "seed = 0, this run 5"),
        ({"train": {"steps": 2}}, "at step 3, past the 2 steps"),
    ],
)
def test_another_run_is_not_resumed(change, message):
    changed = run_config(**{**change, "train": {"steps": 3, **change.get("train", {})}})
    with pytest.raises(CheckpointError, match=message):
        SavedRun(3, run_config(train={"steps": 3}), "").require_resumable(changed)
