"""Training on FP8 copies while Paddle holds no memory for the weights: recompute and hooks."""

from __future__ import annotations

import numpy as np
import pytest
from ernie import (
    FP8,
    Pending,
    bind_main_grads,
    make_batch,
    make_experts,
    make_node,
    paddle,
    weights_of,
)
from framework import numpy
from paddle.distributed.fleet.utils import recompute

from sonicmoe.errors import LayoutError

SEEDS = (0, 1, 2)


def outcome(frees=False, reentrant=None):
    """Every bit of three outstanding micro-batches, and the calls of each weight's hook."""
    experts = make_experts(dtype="bfloat16")
    weights = weights_of(experts)
    main_grads, calls = bind_main_grads(experts), [0] * len(weights)
    for position, weight in enumerate(weights):
        weight._register_backward_hook(
            lambda *_, position=position: calls.__setitem__(position, calls[position] + 1)
        )
    node = make_node(experts, FP8, "auto")
    copies = None
    if frees:
        copies = node.make_copies()
        for weight in weights:
            weight._clear_to_zero_allocation()

    def call(x, counts, indices, probs):
        def run(x, probs):
            return node(x, counts, indices, probs, copies=copies)

        return (
            run(x, probs)
            if reentrant is None
            else recompute(run, x, probs, use_reentrant=reentrant)
        )

    pending = [Pending(node, make_batch(seed=seed), dtype="bfloat16", call=call) for seed in SEEDS]
    found = [array for waiting in pending for array in vars(waiting.backward()).values()]
    assert not frees or not any(weight._is_initialized() for weight in weights)
    return found + list(map(numpy, main_grads)), calls


@pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"]
)
def test_freed_weights_change_no_bit_and_no_hook(reentrant):
    wanted, wanted_calls = outcome(reentrant=reentrant)
    found, calls = outcome(True, reentrant)
    assert all(map(np.array_equal, found, wanted)) and len(found) == len(wanted)
    assert calls == wanted_calls == [len(SEEDS)] * 6


def test_weights_without_a_device_are_named():
    """Paddle takes no such tensor into a graph; without one nobody asks it for its device."""
    experts = make_experts(dtype="bfloat16")
    node = make_node(experts, FP8, "auto")
    batch, copies = make_batch(), node.make_copies()

    def call(*arguments):
        return node(*arguments, copies=copies)

    wanted = numpy(Pending(node, batch, dtype="bfloat16", call=call).out)
    weights_of(experts)[3]._clear_data()
    with pytest.raises(LayoutError, match=r"weight 3 of the experts .* needed: _clear_to_zero"):
        Pending(node, batch, dtype="bfloat16", call=call)
    with paddle.no_grad():
        found = Pending(node, batch, dtype="bfloat16", call=call).out
    assert np.array_equal(numpy(found), wanted)
