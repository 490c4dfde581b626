"""The contract of ids (docs/design.md, "Routing contract"): -1 and ids >= E both mean "not here", in
every function that takes ids, `ep/` included.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.ep import LocalDispatcher
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.ids import NOT_HERE, count_experts, group_of, in_one_spelling, is_here

EXPERTS = 4
# Valid ids in every slot but one, whose every spelling of "not here" must mean the same.
SPELLINGS = [-1, -2, EXPERTS, EXPERTS + 1, 2**31 - 1, 2**31, 2**40, -(2**40)]


def ids_with(spelling):
    return np.array([[0, 3, 1], [2, spelling, 0], [1, 3, 2]], np.int64)


def valid(ids):
    return np.array([[0 <= one < EXPERTS for one in row] for row in ids.tolist()])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_python_decides_in_one_place(spelling):
    ids = ids_with(spelling)
    here = valid(ids)
    assert here.sum() == 8
    assert np.array_equal(is_here(ids, EXPERTS), here), "arrays"
    assert np.array_equal(numpy(is_here(tensor(ids), EXPERTS)).astype(bool), here)
    assert np.array_equal(numpy(group_of(tensor(ids), EXPERTS)), np.where(here, ids, EXPERTS))
    one = numpy(in_one_spelling(tensor(ids), EXPERTS))
    assert np.array_equal(one, np.where(here, ids, NOT_HERE))
    assert numpy(count_experts(tensor(ids), EXPERTS)).tolist() == [2, 2, 2, 2]


def test_nothing_to_count():
    empty = tensor(np.zeros((0, 3), np.int64))
    assert numpy(count_experts(empty, EXPERTS)).tolist() == [0] * EXPERTS


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_local_dispatcher_delivers_what_it_promises(spelling):
    """`Dispatched.indices` in `[0, E)` or -1, probabilities exactly 0 there, and so their
    gradients; NaN at such a slot reaches nothing.
    """
    ids = ids_with(spelling)
    here = valid(ids)
    given = np.where(here, 0.5, np.nan).astype(np.float32)
    weights = tensor(given, torch.float32, grad=True)
    received = LocalDispatcher(EXPERTS).dispatch(
        tensor(np.ones((3, 8)), torch.float32), tensor(ids), weights
    )
    assert np.array_equal(numpy(received.indices), np.where(here, ids, -1))
    assert np.array_equal(numpy(received.probs), np.where(here, 0.5, 0))
    assert received.tokens_per_expert == [2, 2, 2, 2]
    received.probs.sum().backward()
    assert np.array_equal(numpy(weights.grad), here.astype(np.float32))
    routing = build_routing(received.indices, received.probs.detach(), EXPERTS)
    wanted = build_routing(tensor(ids), received.probs.detach(), EXPERTS)
    for one, other in zip(routing.tensors(), wanted.tensors(), strict=True):
        assert np.array_equal(numpy(one), numpy(other))
