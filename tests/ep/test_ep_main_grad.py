"""`main_grad` under Paddle's own reductions, in two real Paddle processes."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.paddle

BOUND = 2e-5
WEIGHTS, BATCHES = 8, 4


@pytest.fixture
def ranks(world_results):
    return [
        {name.removeprefix("main_grad/"): value for name, value in rank.items()}
        for rank in world_results("paddle", 2)
    ]


@pytest.mark.parametrize("flush", ["auto", "step"])
@pytest.mark.parametrize("case", ["data parallel", "delayed scale", "after delayed scale"])
def test_reduced_gradients_are_the_mean_over_ranks(ranks, case, flush):
    for result in ranks:
        assert result[f"{case}, {flush}"] <= BOUND


@pytest.mark.parametrize("case", ["overlap", "reduce scatter", "pipeline"])
def test_a_reduction_that_overlaps_the_backward_sees_all_gradients(ranks, case):
    for result in ranks:
        assert result[f"{case}, auto"] <= BOUND


def test_hooks_fire_once_per_weight_and_backward(ranks):
    for result in ranks:
        assert result["overlap hooks, auto"] == WEIGHTS * BATCHES
        assert result["pipeline hooks, auto"] == 2 * WEIGHTS * BATCHES


def test_a_step_behind_the_reduction_is_refused_where_gradients_wait(ranks):
    for result in ranks:
        assert result["late refused, step"] == 1
        assert result["late error, auto"] <= BOUND
        assert result["late refused, auto"] == 0
