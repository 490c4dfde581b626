"""Worlds of 2 and 4 processes against one process: outputs and every gradient, whatever the
routing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ep_cases import EXPERTS, MATRICES, cases, joined, not_here
from ep_layer import run_layer
from framework import relative_rmse

from sonicmoe.ep import LocalDispatcher

DEEPEP_RECORDINGS = Path(__file__).parents[1] / "data" / "deepep"
FP32_BOUND = 2e-6
FP8_BOUND = 5e-3
WORLDS = [
    pytest.param("torch", 2),
    pytest.param("torch", 4),
    pytest.param("paddle", 2, marks=pytest.mark.paddle),
    pytest.param("paddle", 4, marks=pytest.mark.paddle),
]
DEEPEP_MODES = ("legacy", "legacy worst case", "elastic", "elastic without sync")
KEYS = ("y", "dx", "dweights", *MATRICES)
CASES = list(cases(2))


@cache
def one_process(world, case, **options):
    """The same tokens in one process, all experts local."""
    return run_layer(LocalDispatcher(EXPERTS), joined(cases(world)[case]), **options)


def whole(results, run, case):
    """All ranks' arrays joined: tokens by source rank, experts by owner."""
    return {key: np.concatenate([rank[f"{run}/{case}/{key}"] for rank in results]) for key in KEYS}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework,world", WORLDS)
def test_equals_one_process(world_results, framework, world, case):
    results, wanted = whole(world_results(framework, world), "fp32", case), one_process(world, case)
    for key in KEYS:
        assert results[key].shape == wanted[key].shape, key
        assert relative_rmse(results[key], wanted[key]) <= FP32_BOUND, key
        assert np.isfinite(results[key]).all(), key


@pytest.mark.parametrize("framework,world", WORLDS)
def test_fp8_equals_one_process_within_rounding(world_results, framework, world):
    """x is quantised per token and dw per expert from the same rows; only bf16 roundings of the
    partial sums differ.
    """
    options = {"dtype": "bfloat16", "fp8": True}
    results, wanted = (
        whole(world_results(framework, world), "fp8", "uneven"),
        one_process(world, "uneven", **options),
    )
    for key in KEYS:
        assert relative_rmse(results[key], wanted[key]) <= FP8_BOUND, key


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework,world", WORLDS)
def test_contract_of_what_is_delivered(world_results, framework, world, case):
    """One row per (token, rank), source order, local ids in their slots, true counts, weights
    exactly 0 elsewhere.
    """
    sources, local = cases(world)[case], EXPERTS // world
    everything = joined(sources)
    for rank, result in enumerate(world_results(framework, world)):
        here = (everything.ids >= rank * local) & (everything.ids < (rank + 1) * local)
        rows = here.any(1)
        got = {
            key: result[f"fp32/{case}/{key}"]
            for key in ("recv_x", "recv_idx", "recv_probs", "counts")
        }
        assert np.array_equal(got["recv_x"], everything.x[rows])
        assert np.array_equal(
            got["recv_idx"], np.where(here, everything.ids - rank * local, -1)[rows]
        )
        assert np.array_equal(got["recv_probs"], np.where(here, everything.weights, 0)[rows])
        assert got["counts"].tolist() == [
            int((everything.ids == rank * local + e).sum()) for e in range(local)
        ]


@pytest.mark.parametrize("framework,world", WORLDS)
def test_gradients_of_dropped_slots_are_exactly_zero(world_results, framework, world):
    for case, sources in cases(world).items():
        for rank, result in enumerate(world_results(framework, world)):
            assert not result[f"fp32/{case}/dweights"][not_here(sources[rank].ids)].any(), case


@pytest.mark.parametrize("framework,world", WORLDS)
def test_repeated_runs_are_bit_identical(world_results, framework, world):
    for result in world_results(framework, world):
        for first, second in (("fp32", "again"), ("fp8", "fp8 again")):
            names = [name for name in result if name.startswith(f"{first}/")]
            assert len(names) == len(CASES) * 9
            for name in names:
                twin = result[name.replace(first, second, 1)]
                assert result[name].tobytes() == twin.tobytes(), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("run", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("framework,world", WORLDS)
def test_counts_that_nobody_knows_change_no_bit(world_results, framework, world, run, case):
    """Its unused memory is full of NaN, and its rows are those of the exact dispatch with others
    between them.
    """
    for result in world_results(framework, world):
        for key in KEYS:
            actual, wanted = (result[f"{one}/{case}/{key}"] for one in (f"fixed {run}", run))
            assert actual.tobytes() == wanted.tobytes(), key
        fixed = f"fixed {run}/{case}"
        ids, probs, x = (result[f"{fixed}/recv_{key}"] for key in ("idx", "probs", "x"))
        assert len(ids) == world * 41 and (result[f"{fixed}/counts"] == -1).all()
        real = (ids >= 0).any(1)
        assert not probs[ids < 0].any()
        for key, array in (("idx", ids), ("probs", probs), ("x", x)):
            assert np.array_equal(array[real], result[f"{run}/{case}/recv_{key}"])
        assert np.isnan(x).any(), "no memory was poisoned"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", DEEPEP_MODES)
@pytest.mark.parametrize("world", [2, 4])
def test_deepep_gives_the_bits_of_the_collectives(world_results, world, mode, case):
    """One contract: garbage rows, missing counts and foreign weights of the emulated library leave
    no trace in any result.
    """
    for result in world_results("torch", world):
        for key in KEYS:
            actual, wanted = result[f"{mode}/{case}/{key}"], result[f"bf16/{case}/{key}"]
            assert actual.tobytes() == wanted.tobytes(), key
        ids, probs = (result[f"{mode}/{case}/{key}"] for key in ("recv_idx", "recv_probs"))
        real = len(result[f"bf16/{case}/recv_idx"])
        assert mode != "legacy worst case" or len(ids) == world * 41
        assert (
            np.array_equal(ids[:real], result[f"bf16/{case}/recv_idx"]) and (ids[real:] == -1).all()
        )
        assert (
            np.array_equal(probs[:real], result[f"bf16/{case}/recv_probs"])
            and not probs[real:].any()
        )


@pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=pytest.mark.paddle)])
def test_collectives_deliver_what_deepep_delivered(world_results, framework):
    """Bit for bit, order included, on the inputs of a dispatch recorded on two GPUs."""
    for rank, result in enumerate(world_results(framework, 2)):
        with np.load(DEEPEP_RECORDINGS / f"dispatched_rank{rank}.npz") as recording:
            bits = recording["recv_x"].view(np.uint16).astype(np.uint32) << 16
            assert np.array_equal(result["recorded/x"], bits.view(np.float32))
            assert np.array_equal(result["recorded/idx"], recording["recv_topk_idx"])
            assert np.array_equal(result["recorded/weights"], recording["recv_topk_weights"])
            assert np.array_equal(
                result["recorded/counts"], recording["num_recv_tokens_per_expert_list"]
            )
