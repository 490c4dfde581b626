"""Impossible settings are refused by name; the schedule; the estimate of memory, which counts what is
there and refuses nothing that could run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_run import SIZES, run_config

from ernie_compat.model_config import ModelConfig, RunConfig, TrainConfig
from ernie_compat.trainer import backend
from sonicmoe.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "field", "value", "message"),
    [
        (ModelConfig, "topk", 9, "topk 9 exceeds num_experts 8"),
        (ModelConfig, "num_heads", 3, "hidden_size 128 is not a multiple of num_heads 3"),
        (ModelConfig, "num_heads", 128, "rotary"),
        (ModelConfig, "num_layers", 1, "dense_layers 1 leaves no MoE layer"),
        (ModelConfig, "vocab_size", 0, "vocab_size is 0"),
        (ModelConfig, "seq_len", 1.5, "seq_len is 1.5"),
        (ModelConfig, "hidden_size", True, "hidden_size is True"),
        (TrainConfig, "steps", 0, "steps is 0"),
        (TrainConfig, "micro_batches", 3, "batch_size 8 is not a multiple of micro_batches 3"),
        (TrainConfig, "lr", float("inf"), "lr is inf"),
        (TrainConfig, "checkpoint_every", -1, "checkpoint_every is -1"),
        (RunConfig, "precision", "fp4", "precision is 'fp4'"),
    ],
)
def test_impossible_settings(settings, field, value, message):
    with pytest.raises(ConfigError, match=message):
        settings(**{field: value})


def test_schedule_warms_up_linearly_and_ends_at_its_floor():
    train = TrainConfig(steps=100, lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [train.learning_rate(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"no_such_field": 1}},
        *({"capture_layers": layers} for layers in ((0,), (1, 2), ("1",), (True,), (-1,), 1, "1")),
    ],
)
def test_json_that_is_no_configuration(change):
    with pytest.raises(ConfigError, match=r"capture_layers has|not readable"):
        RunConfig.from_json(run_config().to_json() | change)


def test_parameters_are_those_of_the_model():
    model = ModelConfig(num_layers=5, dense_layers=2, topk=3, num_experts=6)
    learner = backend("torch").Learner(model, TrainConfig(), "fp32", "auto")
    assert model.parameters == sum(p.numel() for p in learner.parameters.values())


def test_what_does_not_split_over_the_ranks_or_fit_is_refused():
    run_config().require_startable(4)
    with pytest.raises(ConfigError, match="a micro-batch of 2 cannot be split over 4 ranks"):
        run_config(train={"micro_batches": 2}).require_startable(4)
    with pytest.raises(ConfigError, match="num_experts of 4 cannot be split over 3 ranks"):
        run_config(train={"batch_size": 6}).require_startable(3)
    with pytest.raises(ConfigError, match=r"10\^\d+ parameters.*at least .* GiB of memory"):
        run_config(model=replace(SIZES, num_layers=10**18)).require_startable(1)
