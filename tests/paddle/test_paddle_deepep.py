"""The node on tensors that a real two-rank DeepEP dispatch delivered, and on what its other modes
deliver.

tests/data/deepep: T=160 tokens a rank, H=256, 8 experts on 2 ranks, K=2; inputs and outputs of
`Buffer.dispatch`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from ernie import (
    DEEPEP,
    FP8,
    PRECISE,
    PRECISE_BOUND,
    Batch,
    assert_close,
    assert_weight_gradients,
    bind_main_grads,
    golden,
    make_experts,
    make_node,
    run,
)
from framework import numpy

EXPERTS, HIDDEN, INTERMEDIATE = 4, 256, 96
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
    """What the rank's node is called with, plus a gradient of out."""
    data = recording(rank)
    x = bf16_values(data["recv_x"])
    dout = np.random.default_rng(rank).standard_normal(x.shape).astype(np.float32)
    counts = data["num_recv_tokens_per_expert_list"].tolist()
    return Batch(x, data["recv_topk_idx"], data["recv_topk_weights"], dout, counts)


def with_worst_case_tail(batch, rows=64, garbage=np.nan):
    """`num_worst_tokens`: more rows, ids -1, everything else uninitialised; DeepEP then returns no
    counts.
    """

    def tail(array, value):
        return np.concatenate([array, np.full((rows, array.shape[1]), value, array.dtype)])

    return Batch(
        tail(batch.x, garbage),
        tail(batch.indices, -1),
        tail(batch.probs, garbage),
        tail(batch.dout, 1.0),
        [],
    )


def experts_of(rank, dtype="float32"):
    """The four experts of a rank."""
    return make_experts(EXPERTS, HIDDEN, INTERMEDIATE, dtype, seed=rank)


@pytest.mark.parametrize(("mode", "garbage"), [("precise", np.nan), ("fp8", 3e38)])
def test_worst_case_rows_are_never_read(mode, garbage):
    """Rows beyond the real ones give exact zeros and leave no trace, whatever bytes they hold."""
    config, dtype = {"precise": (PRECISE, "float32"), "fp8": (FP8, "bfloat16")}[mode]
    batch = received(1)
    n = len(batch.x)
    outcomes = []
    for sample in (batch, with_worst_case_tail(batch, garbage=garbage)):
        experts = experts_of(1, dtype)
        node, main_grads = make_node(experts, config), bind_main_grads(experts)
        result = run(node, sample, dtype=dtype)
        node.step()
        outcomes.append((result, [numpy(m) for m in main_grads]))
    (real, real_dw), (padded, padded_dw) = outcomes
    for name in ("out", "dx", "dprobs"):
        assert np.array_equal(getattr(padded, name)[:n], getattr(real, name)), name
        assert not getattr(padded, name)[n:].any(), name
    assert all(np.array_equal(a, b) for a, b in zip(padded_dw, real_dw, strict=True))


def global_batches():
    """`(x, topk_idx, topk_weights)` of each source rank, before dispatch."""
    return [(bf16_values(d["x"]), d["topk_idx"], d["topk_weights"]) for d in map(recording, RANKS)]


def test_both_ranks_combined_equal_the_undispatched_layer():
    """DeepEP's combine sums rows over ranks unweighted, its backward sums dprobs per slot: then
    nothing may be missing or counted twice.
    """
    all_experts = experts_of(0) + experts_of(1)
    sources = global_batches()
    x, ids, probs = (np.concatenate(parts) for parts in zip(*sources, strict=True))
    tokens = len(sources[0][0])
    dout = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)
    out, dx, dprobs = np.zeros(x.shape), np.zeros(x.shape), np.zeros(probs.shape)
    dw_up, dw_down = [], []
    for rank in RANKS:
        batch, data = received(rank), recording(rank)
        first_of_second_source = int(data["rank_prefix_matrix"][0, rank])
        source = data["recv_src_idx"].astype(np.int64)
        source[first_of_second_source:] += tokens
        assert np.array_equal(batch.x, x[source]), "the recording's rows are in source order"
        local = all_experts[rank * EXPERTS : (rank + 1) * EXPERTS]
        node, main_grads = make_node(local), bind_main_grads(local)
        result = run(node, Batch(batch.x, batch.indices, batch.probs, dout[source], batch.counts))
        node.step()
        for total, part in ((out, result.out), (dx, result.dx), (dprobs, result.dprobs)):
            np.add.at(total, source, part)
        dw_up += [numpy(m) for m in main_grads[:EXPERTS]]
        dw_down += [numpy(m) for m in main_grads[EXPERTS:]]
    wanted = golden(all_experts, [Batch(x, ids, probs, dout, [])])
    for name, actual in (("out", out), ("dx", dx), ("dprobs", dprobs)):
        assert_close(actual, getattr(wanted.results[0], name), PRECISE_BOUND, name)
    assert_weight_gradients(dw_up + dw_down, wanted.dw, PRECISE_BOUND)
