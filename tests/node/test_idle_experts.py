"""Experts without a row in a batch: gradients of zeros, or none where that is asked for."""

from __future__ import annotations

import pytest
from framework import IS_PADDLE, numpy
from node.node_harness import Layer, make_problem

pytestmark = pytest.mark.skipif(IS_PADDLE, reason="modules and optimizers of PyTorch")
IDLE, PROBLEM = 2, make_problem()  # which has no token for that expert


@pytest.mark.parametrize("counts", ["list", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_they_have_none_as_in_a_loop_over_the_others(shared, counts):
    """So no optimizer decays them. A weight that a busy expert shares has its gradient."""
    layers = [Layer(PROBLEM, idle_grads=asked) for asked in (False, True)]
    for layer in layers:
        if shared:
            layer.experts[IDLE].down_proj = layer.experts[0].down_proj
            layer.weights[4 + IDLE] = layer.weights[4]
        layer.run(counts=counts)
    none, zeros = layers
    idle = [index for index, weight in enumerate(none.weights) if weight.grad is None]
    assert idle == ([IDLE] if shared else [IDLE, 4 + IDLE])
    assert not any(numpy(zeros.weights[index].grad).any() for index in idle)
    for index, weight in enumerate(none.weights):
        none.weights[index].grad = zeros.weights[index].grad if weight.grad is None else weight.grad
    assert shared or none.error(attribute="grad") < 1e-5
    assert all((a.grad == b.grad).all() for a, b in zip(none.weights, zeros.weights, strict=True))
