"""Impossible settings are refused by name; the schedule; the round trip through JSON."""

from __future__ import annotations

import json

import pytest
from small_run import run_config

from ernie_compat.model_config import ModelConfig, RunConfig, TrainConfig
from sonicmoe.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("topk", 9, "topk 9 exceeds num_experts 8"),
        ("num_heads", 3, "hidden_size 128 is not a multiple of num_heads 3"),
        ("num_heads", 128, "rotary"),
        ("num_layers", 1, "dense_layers 1 leaves no MoE layer"),
        ("vocab_size", 0, "vocab_size is 0"),
        ("intermediate_size", -1, "intermediate_size is -1"),
        ("seq_len", 1.5, "seq_len is 1.5"),
        ("hidden_size", True, "hidden_size is True"),
        ("aux_loss_coef", float("nan"), "aux_loss_coef is nan"),
    ],
)
def test_impossible_model(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps is 0"),
        ("micro_batches", 3, "batch_size 8 is not a multiple of micro_batches 3"),
        ("lr", 0.0, "lr is 0.0"),
        ("lr", float("inf"), "lr is inf"),
        ("checkpoint_every", -1, "checkpoint_every is -1"),
        ("seed", -1, "seed is -1"),
    ],
)
def test_impossible_run(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{field: value})


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="precision is 'fp4'"):
        RunConfig(precision="fp4")
    with pytest.raises(ConfigError, match="framework is 'jax'"):
        RunConfig(framework="jax")


def test_schedule_warms_up_linearly_and_ends_at_its_floor() -> None:
    train = TrainConfig(steps=100, lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [train.learning_rate(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)


def test_json_round_trip() -> None:
    config = run_config(precision="bf16", compare=True, train={"lr": 0.25}, capture_layers=(1,))
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("layers", [(0,), (1, 2), ("1",), (True,), (-1,), 1, "1"])
def test_layers_to_capture_are_moe_layers(layers: object) -> None:
    written = run_config().to_json() | {"capture_layers": layers}
    with pytest.raises(ConfigError, match=r"capture_layers has|not readable"):
        RunConfig.from_json(written)


def test_unreadable_json_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="not readable"):
        RunConfig.from_json({"model": {"no_such_field": 1}, "train": {}})
