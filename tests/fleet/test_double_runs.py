"""Whole runs of Fleet's side: its two loaders, and a hundred steps beside plain Paddle experts."""

from __future__ import annotations

import double_cases as cases
import numpy as np
import pytest
from fleet.double import load, model

STEPS, TOKENS, LR = 100, 128, 1e-3
PRECISIONS = {"bf16": {}, "fp8": {"fp8": "e4m3"}}
# Of the mean loss of the last twenty steps; FP8's is the project's bar for its main job.
BOUNDS = {"bf16": 2e-4, "fp8": 2.5e-3}


@pytest.mark.parametrize("loader", ["eager", "lazy"])
def test_this_package_on_hopper(loader):
    """A step in FP8 after `install()`, with either loader; without it Hopper is shut out again."""
    with cases.engine(loader) as fleet:
        assert fleet.ops.is_sonic_moe_available()
        trainer = model.sonic_trainer(fleet, cases.config_of(fleet, fp8="e4m3"))
        losses = [trainer.step(model.micro_batches(0, 2, 32)) for _ in range(3)]
        assert losses[2] < losses[0]
        assert fleet.expert.run_sonic_moe.__module__ == "sonicmoe.fleet.run"
        assert fleet.expert.fused_grouped_w1_to_sonic.__module__ == "sonicmoe.fleet.weight_layout"
        assert fleet.fused_a2a._SONIC_PACK_SCALE_WORDS_AVAILABLE
    with load(loader) as fleet:
        assert not fleet.ops.is_sonic_moe_available()


def losses_of(trainer):
    """Every fourth step has two micro-batches."""
    given = [model.micro_batches(step, 1 + (step % 4 == 0), TOKENS) for step in range(STEPS)]
    return np.array([trainer.step(batches) for batches in given])


@pytest.fixture(scope="module")
def plain():
    with cases.engine() as fleet:
        return losses_of(model.plain_trainer(fleet, cases.config_of(fleet), lr=LR))


@pytest.mark.trained
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hundred_steps(plain, precision, record_property):
    with cases.engine() as fleet:
        config = cases.config_of(fleet, **PRECISIONS[precision])
        found = losses_of(model.sonic_trainer(fleet, config, lr=LR))
    gap = found[-20:].mean() / plain[-20:].mean() - 1
    record_property("loss_gap_percent", round(100 * float(gap), 4))
    print(f"{precision}: loss {found[-20:].mean():.4f}, gap {100 * gap:+.4f} %")
    assert plain[-20:].mean() < 0.5 * plain[0], "both learn"
    assert abs(gap) <= BOUNDS[precision]
