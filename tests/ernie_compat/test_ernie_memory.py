"""The estimate of memory counts what is there, and refuses nothing that could run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from small_run import SIZES, run_config

from ernie_compat.initial_weights import parameter_shapes
from ernie_compat.memory import least_memory, parameters, require_room
from ernie_compat.model_config import ModelConfig
from sonicmoe.errors import ConfigError


@pytest.mark.parametrize(
    "model",
    [SIZES, ModelConfig(), ModelConfig(num_layers=5, dense_layers=2, topk=3, num_experts=6)],
)
def test_parameters_are_those_of_the_model(model: ModelConfig) -> None:
    assert parameters(model) == sum(map(math.prod, parameter_shapes(model).values()))


def test_the_bound_grows_with_the_run_and_shrinks_with_the_ranks() -> None:
    plain = run_config(train={"batch_size": 8})
    alone = least_memory(plain, 1, on_gpu=False)
    assert least_memory(replace(plain, compare=True), 1, on_gpu=False) > alone
    assert least_memory(plain, 4, on_gpu=False) < alone
    assert least_memory(plain, 1, on_gpu=True) < alone
    without = replace(plain, compare=True, train=replace(plain.train, checkpoint=False))
    # One learner's initial weights after the other's, and no copy of the moments.
    assert least_memory(without, 1, on_gpu=True) < least_memory(plain, 1, on_gpu=True)
    assert least_memory(without, 1, on_gpu=False) > alone
    require_room(plain, 1)


def test_layers_without_end_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"10\^\d+ parameters.*at least 10\^\d+ GiB of memory"):
        require_room(run_config(model=replace(SIZES, num_layers=10**400)), 1)
