"""Worlds of 2 and 4 processes against one process: outputs and every gradient, whatever the
routing.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from ep_cases import DEEPEP, EXPERTS, MATRICES, cases, joined, not_here, precision_of
from ep_layer import run_layer
from ep_upstream import MODES, WAITS, case_of, run_upstream
from framework import relative_rmse

from sonicmoe.ep import LocalDispatcher

FP32_BOUND = 2e-6
FP8_BOUND = 5e-3
KEYS = ("y", "dx", "dweights", *MATRICES)
RECEIVED = ("recv_x", "recv_idx", "recv_probs")
PADDLE = pytest.param("paddle", marks=pytest.mark.paddle)
each_case = pytest.mark.parametrize("case", list(cases(2)))


@pytest.fixture
def results(framework, world, world_results):
    return world_results(framework, world)


each_world = pytest.mark.parametrize(
    ("framework", "world"),
    [("torch", 2), ("torch", 4), pytest.param("paddle", 2, marks=pytest.mark.paddle)],
)


@cache
def one_process(world, case, **options):
    """The same tokens in one process, all experts local."""
    return run_layer(LocalDispatcher(EXPERTS), joined(cases(world)[case]), **options)


def whole(results, run, case):
    """All ranks' arrays joined: tokens by source rank, experts by owner."""
    return {key: np.concatenate([rank[f"{run}/{case}/{key}"] for rank in results]) for key in KEYS}


@each_case
@each_world
def test_equals_one_process_and_delivers_what_the_contract_says(results, world, case):
    """One row per (token, rank), source order, local ids in their slots, true counts, weights
    exactly 0 elsewhere, and so are gradients of dropped slots.
    """
    sources, local = cases(world)[case], EXPERTS // world
    everything = joined(sources)
    for rank, result in enumerate(results):
        first = rank * local
        here = (everything.ids >= first) & (everything.ids < first + local)
        rows = here.any(1)
        wanted = {
            "recv_x": everything.x[rows],
            "recv_idx": np.where(here, everything.ids - first, -1)[rows],
            "recv_probs": np.where(here, everything.weights, 0)[rows],
            "counts": [int((everything.ids == first + e).sum()) for e in range(local)],
        }
        for key, value in wanted.items():
            assert np.array_equal(result[f"fp32/{case}/{key}"], value), key
        assert not result[f"fp32/{case}/dweights"][not_here(sources[rank].ids)].any()
    require_close(whole(results, "fp32", case), one_process(world, case), FP32_BOUND)


def require_close(found, wanted, bound):
    for key in KEYS:
        assert found[key].shape == wanted[key].shape and np.isfinite(found[key]).all(), key
        assert relative_rmse(found[key], wanted[key]) <= bound, key


@each_world
def test_fp8_equals_one_process_within_rounding(results, world):
    """x is quantised per token and dw per expert from the same rows; only bf16 roundings of the
    partial sums differ.
    """
    wanted = one_process(world, "uneven", dtype="bfloat16", fp8=True)
    require_close(whole(results, "fp8", "uneven"), wanted, FP8_BOUND)


@each_world
def test_repeated_runs_are_bit_identical(results):
    for result in results:
        names = [name for name in result if " again/" in name]
        assert len(names) == 2 * len(cases(2)) * 9
        for name in names:
            twin = result[name.replace(" again", "")]
            assert result[name].tobytes() == twin.tobytes(), name


@each_case
@pytest.mark.parametrize(
    "mode", ["fixed size", "deepep", "deepep worst case", "symmetric", "symmetric fixed"]
)
@each_world
def test_every_transport_gives_the_bits_of_the_collectives(results, world, mode, case):
    """One contract: the same rows in the same order, and nobody's behind them, or between them where the
    size is fixed. Memory full of NaN, garbage rows, missing counts and foreign weights of a library
    leave no trace in any result.
    """
    exact = "bf16" if "deepep" in mode else precision_of(case)
    blind = mode not in ("deepep", "symmetric")
    for result in results:
        if f"{mode}/{case}/y" not in result:
            pytest.skip("Paddle has none, or its kernels cannot be compiled here")
        found, wanted = (
            {key: result[f"{run}/{case}/{key}"] for key in (*KEYS, *RECEIVED, "counts")}
            for run in (mode, exact)
        )
        for key in KEYS:
            assert found[key].tobytes() == wanted[key].tobytes(), key
        ids, probs, count = found["recv_idx"], found["recv_probs"], len(wanted["recv_idx"])
        real = (ids >= 0).any(1)
        for key in RECEIVED:
            assert np.array_equal(found[key][real], wanted[key]), key
        assert not probs[ids < 0].any()
        assert len(ids) == (world * 41 if blind else count)
        assert np.isnan(found["recv_x"]).any() if mode == "fixed size" else real[:count].all()
        known = np.full_like(wanted["counts"], -1) if blind else wanted["counts"]
        assert np.array_equal(found["counts"], known)


@pytest.mark.parametrize("mode", MODES)
def test_upstreams_functions_equal_one_process(world_results, mode):
    """Which without ranks is `MoE`'s function on all experts: tests/functional."""
    wanted, prefix = run_upstream(joined(cases(2)[case_of(mode)]), mode), f"upstream/{mode}"
    for name, whole in wanted.items():
        parts = [rank[f"{prefix}/{name}"] for rank in world_results("torch", 2)]
        # Every rank has the sum of the router's gradient.
        found = parts if name.endswith("drouter") else [np.concatenate(parts)]
        for array in found:
            assert array.shape == whole.shape and np.abs(whole).max() > 0, name
            assert relative_rmse(array, whole) <= FP32_BOUND, name


def test_the_operator_gives_the_bits_of_upstreams_function(world_results):
    for result in world_results("torch", 2):
        for waits, mode in WAITS.items():
            for key in KEYS:
                found = result[f"upstream/routed, {waits}/{key}"]
                assert np.array_equal(found, result[f"upstream/{mode}/{key}"]), key


def test_the_layer_of_the_page_trains_on_two_ranks(world_results):
    for result in world_results("torch", 2):
        assert result["upstream/page/experts"] == 4
        norms = [float(result[f"upstream/page/{name}"]) for name in ("x", "up", "down")]
        assert np.isfinite(norms).all() and min(norms) > 0


@pytest.mark.parametrize("framework", ["torch", PADDLE])
def test_collectives_deliver_what_deepep_delivered(world_results, framework):
    """Bit for bit, order included, on the inputs of a dispatch recorded on two GPUs."""
    for rank, result in enumerate(world_results(framework, 2)):
        with np.load(DEEPEP / f"dispatched_rank{rank}.npz") as recording:
            bits = recording["recv_x"].view(np.uint16).astype(np.uint32) << 16
            wanted = {
                "x": bits.view(np.float32),
                "idx": recording["recv_topk_idx"],
                "weights": recording["recv_topk_weights"],
                "counts": recording["num_recv_tokens_per_expert_list"],
            }
            for name, value in wanted.items():
                assert np.array_equal(result[f"recorded/{name}"], value), name


@pytest.mark.paddle
def test_paddles_own_reductions_give_the_mean_over_ranks(world_results):
    """After the backwards and overlapping them; a hook fires once per weight and backward."""
    for result in world_results("paddle", 2):
        assert max(result["main_grad/data parallel"], result["main_grad/overlap"]) <= 2e-5
        assert result["main_grad/hooks"] == 8 * 4
