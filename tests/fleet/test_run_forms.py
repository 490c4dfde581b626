"""The forms in which PaddleFleet's dispatchers call `run_sonic_moe`. `test_double_runs.py` has them
over two ranks.

allgather     every rank holds all experts with 1/EP of their columns; the tokens of all ranks come
              padded, ids int32, counts as an int32 tensor; outputs are summed by a reduce-scatter
ring          the same weights; a micro-batch comes in several calls, a part of the tokens each
single card   ids as the router gives them, int64, and no counts
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from engine.moe_golden import golden, make_problem
from fleet.fleet_calls import Experts, each_layout
from framework import numpy, relative_rmse, tensor, torch
from node.node_harness import counts_of

RANKS, PADDING = 2, 5
each_precision = pytest.mark.parametrize(
    ("fp8", "bound"), [(False, 0.01), (True, 0.09)], ids=["bf16", "fp8"]
)


@pytest.fixture(scope="module")
def problem():
    return make_problem(hidden=128, intermediate=256, dtype=torch.bfloat16)


def columns(problem, rank):
    """The experts of one rank: its columns of gate and up, and its rows of down."""
    inner = problem.intermediate
    own = np.arange(inner).reshape(RANKS, -1)[rank]
    return problem.but(
        up_gate=problem.up_gate[:, :, np.concatenate([own, inner + own])],
        down=problem.down[:, own],
    )


def put_together(parts):
    """`(dw1, dw2)` of all columns from those of every rank, grouped."""
    halves = [np.split(dw1, 2, axis=2) for dw1, _ in parts]
    gate, up = (np.concatenate([pair[i] for pair in halves], axis=2) for i in range(2))
    return np.concatenate([gate, up], axis=2), np.concatenate([dw2 for _, dw2 in parts], axis=1)


def padded(problem):
    """As gathered: rows of no rank behind the tokens, without a slot and without weight, whatever
    they hold.
    """

    def more(array, value):
        return np.concatenate([array, np.full((PADDING, array.shape[1]), value, array.dtype)])

    ids = np.where(problem.indices < problem.num_experts, problem.indices, -1)
    return problem.but(
        x=more(problem.x, np.nan),
        dout=more(problem.dout, 0.0),
        indices=more(ids, -1),
        probs=more(np.where(ids < 0, 0.0, problem.probs), 0.0),
    )


@each_precision
@each_layout
def test_allgather(problem, layout, fp8, bound):
    gathered, sums, parts = padded(problem), 0, []
    for rank in range(RANKS):
        mine = columns(gathered, rank)
        experts = Experts(mine, layout, fp8=fp8)
        counts = tensor(counts_of(mine)).to(torch.int32)
        call = experts.call(counts=counts, index_dtype=torch.int32).backward()
        absent = mine.indices < 0
        assert (call.dprobs[absent] == 0.0).all()
        assert not numpy(call.out)[-PADDING:].any() and not call.dx[-PADDING:].any()
        sums = sums + np.array([numpy(call.out), call.dx])  # what the reduce-scatter adds
        parts.append(experts.gradients())
    wanted, tokens = golden(problem), problem.x.shape[0]
    assert relative_rmse(sums[0][:tokens], wanted.out) < bound
    assert relative_rmse(sums[1][:tokens], wanted.dx) < bound
    for found, exact in zip(put_together(parts), (wanted.dw1, wanted.dw2), strict=True):
        assert relative_rmse(found, exact) < bound


@each_layout
def test_ring(problem, layout):
    """Forwards of all parts first, backwards in reverse: one micro-batch, one sum."""
    mine = columns(problem, 1)
    experts, whole = Experts(mine, layout), Experts(mine, layout)
    wanted = whole.result(whole.call(index_dtype=torch.int32).backward())
    bounds, calls = [0, 14, 14, 37], []  # one part is empty
    for first, last in pairwise(bounds):
        names = ("x", "indices", "probs", "dout")
        part = mine.but(**{name: getattr(mine, name)[first:last] for name in names})
        calls.append(experts.call(part, index_dtype=torch.int32))
    for call in reversed(calls):
        call.backward()
    # A host's matrix product may sum fewer rows in another order, on one processor and not on
    # another; a sum that differs in its last bit may be rounded to another bf16.
    for name, bound in (("out", 1e-3), ("dx", 1e-3), ("dprobs", 1e-6)):
        found = [numpy(call.out) if name == "out" else getattr(call, name) for call in calls]
        assert relative_rmse(np.concatenate(found), getattr(wanted, name)) < bound, name
    for found, exact in zip(experts.gradients(), (wanted.dw1, wanted.dw2), strict=True):
        assert relative_rmse(found, exact) < 1e-6


@each_precision
@each_layout
def test_single_card(problem, layout, fp8, bound):
    """Every token has K experts here."""
    rng = np.random.default_rng(3)
    ids = np.array([rng.permutation(4)[:3] for _ in range(37)], np.int64)
    p = problem.but(indices=ids)
    experts, wanted = Experts(p, layout, fp8=fp8), golden(p)
    result = experts.result(experts.call().backward())
    for name, found in result.items():
        assert relative_rmse(found, getattr(wanted, name)) < bound, name
