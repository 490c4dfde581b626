"""The node on tensors that a real two-rank DeepEP dispatch delivered, and on what its other modes
deliver.

tests/data/deepep: T=160 tokens a rank, H=256, 8 experts on 2 ranks, K=2; inputs and outputs of
`Buffer.dispatch`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from engine.moe_golden import Result, assert_same_bits, golden, make_problem
from framework import numpy, torch
from node.node_harness import FP8, Layer, assert_close, counts_of

DEEPEP = Path(__file__).parents[1] / "data" / "deepep"
EXPERTS = 4
RANKS = (0, 1)


@cache
def recording(rank):
    """Every array of one rank."""
    with np.load(DEEPEP / f"dispatched_rank{rank}.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def bf16_values(bits):
    """fp32 values of bf16 bit patterns."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def received(rank):
    """What the rank's node is called with, four experts, and a gradient of out."""
    data = recording(rank)
    x = bf16_values(data["recv_x"])
    problem = make_problem(hidden=256, intermediate=96, experts=EXPERTS, seed=rank).but(
        x=x,
        indices=data["recv_topk_idx"],
        probs=data["recv_topk_weights"],
        dout=np.random.default_rng(rank).standard_normal(x.shape),
    )
    assert counts_of(problem) == data["num_recv_tokens_per_expert_list"].tolist()
    return problem


def with_worst_case_tail(problem):
    """`num_worst_tokens`: 64 rows more, ids -1, everything else uninitialised; DeepEP then returns no
    counts.
    """

    def tail(name, value):
        array = getattr(problem, name)
        return np.concatenate([array, np.full((64, array.shape[1]), value, array.dtype)])

    values = {"x": 3e38, "indices": -1, "probs": 3e38, "dout": 1.0}
    return problem.but(**{name: tail(name, value) for name, value in values.items()})


def test_worst_case_rows_are_never_read():
    """Rows beyond the real ones give exact zeros and leave no trace. tests/oracle has NaN there."""
    problem, outcomes = received(1), []
    for sample, counts in ((problem, "list"), (with_worst_case_tail(problem), "empty")):
        layer = Layer(sample, dtype=torch.bfloat16, config=FP8, main_grad=0.0)
        outcomes.append(layer.result(layer.step(counts=counts)))
    real, padded = outcomes
    for name in ("out", "dx", "dprobs"):
        rows = getattr(padded, name)
        assert not rows[len(problem.x) :].any(), name
        setattr(padded, name, rows[: len(problem.x)])
    assert_same_bits(padded, real)


def global_batches():
    """`(x, topk_idx, topk_weights)` of each source rank, before dispatch."""
    return [(bf16_values(d["x"]), d["topk_idx"], d["topk_weights"]) for d in map(recording, RANKS)]


def test_both_ranks_combined_equal_the_undispatched_layer():
    """DeepEP's combine sums rows over ranks unweighted, its backward sums dprobs per slot: then
    nothing may be missing or counted twice.
    """
    sources = global_batches()
    x, ids, probs = (np.concatenate(parts) for parts in zip(*sources, strict=True))
    tokens = len(sources[0][0])
    dout = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)
    out, dx, dprobs = np.zeros(x.shape), np.zeros(x.shape), np.zeros(probs.shape)
    layers = []
    for rank in RANKS:
        problem, data = received(rank), recording(rank)
        first_of_second_source = int(data["rank_prefix_matrix"][0, rank])
        source = data["recv_src_idx"].astype(np.int64)
        source[first_of_second_source:] += tokens
        assert np.array_equal(problem.x, x[source]), "the recording's rows are in source order"
        layers.append(Layer(problem.but(dout=dout[source]), main_grad=0.0))
        call = layers[-1].step()
        for total, part in ((out, numpy(call.out)), (dx, call.dx), (dprobs, call.dprobs)):
            np.add.at(total, source, part)
    whole = layers[0].problem.but(
        x=x,
        indices=ids,
        probs=probs,
        dout=dout,
        up_gate=np.concatenate([layer.problem.up_gate for layer in layers]),
        down=np.concatenate([layer.problem.down for layer in layers]),
    )
    gradients = map(np.concatenate, zip(*(layer.gradients() for layer in layers), strict=True))
    assert_close(Result(out, dx, dprobs, *gradients), golden(whole))
