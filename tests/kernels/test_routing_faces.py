"""The Python faces of the routing kernels where no GPU is needed: sizes, counts, the choice of
kernels and its one log line.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe.ernie_compat import deepep_topk_metadata_cuda as face
from sonicmoe.errors import DTypeError, RoutingError, ShapeError
from sonicmoe.jit.errors import CompileForbiddenError, ToolchainError
from sonicmoe.routing import backends
from sonicmoe.routing.build import build_routing, num_rows_bound
from sonicmoe.routing.combine import aggregate
from sonicmoe.routing.metadata import round_up


def sized_as_on_a_gpu(*arguments, **options):
    return build_routing(*arguments, static_rows=True, **options)


def dispatch(seed=0, tokens=300, topk=3, experts=5):
    rng = np.random.default_rng(seed)
    return tensor(rng.integers(-1, experts + 1, (tokens, topk))), tensor(
        rng.random((tokens, topk)), torch.float32
    )


@pytest.fixture
def fresh_choice():
    backends._choose.cache_clear()
    backends.plain_kernels.cache_clear()
    yield
    backends._choose.cache_clear()
    backends.plain_kernels.cache_clear()


@pytest.mark.parametrize("alignment", [128, 256])
def test_host_tensors_give_the_reference_and_padding(alignment):
    indices, probs = dispatch()
    want = build_routing(indices, probs, 5, alignment=alignment)
    exact = sized_as_on_a_gpu(indices, probs, 5, list(want.host_counts), alignment=alignment)
    assert exact.num_rows == want.num_rows
    worst = sized_as_on_a_gpu(indices, probs, 5, alignment=alignment)
    assert worst.num_rows == num_rows_bound(900, 5, alignment) >= want.num_rows
    for name in want.TENSOR_FIELDS:
        expected = numpy(getattr(want, name))
        assert np.array_equal(numpy(getattr(exact, name)), expected), name
        longer = numpy(getattr(worst, name))
        if name.startswith("row_"):
            assert (longer[want.num_rows :] == (0 if name == "row_prob" else -1)).all(), name
            longer = longer[: want.num_rows]
        assert np.array_equal(longer, expected), name


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=9),
    st.sampled_from([128, 256, 512]),
    st.integers(0, 50),
)
def test_row_bound_holds_and_is_whole_tiles(counts, alignment, invalid):
    bound = num_rows_bound(sum(counts) + invalid, len(counts), alignment)
    assert bound % alignment == 0
    assert bound >= sum(round_up(count, alignment) for count in counts)


@pytest.mark.parametrize("slots", range(0, 400, 7))
def test_row_bound_is_reached(slots):
    """No smaller bound would do: some routing of so many slots needs every row."""
    assert num_rows_bound(slots, 1, 128) == round_up(slots, 128)
    two_experts = (
        round_up(count, 128) + round_up(slots - count, 128) for count in range(slots + 1)
    )
    assert num_rows_bound(slots, 2, 128) == max(two_experts)


@pytest.mark.parametrize("counts", [[3, 2], [0, 0], [128, 256], [128, 1]])
def test_given_counts_size_the_rows_and_are_not_taken_for_true(counts):
    """They may be rounded up, or wrong: only `validate` looks, and then the host knows the counts
    of the indices.
    """
    indices, probs = tensor(np.zeros((0, 2), np.int64)), tensor(np.zeros((0, 2)), torch.float32)
    routing = sized_as_on_a_gpu(indices, probs, 2, counts)
    assert routing.host_counts is None and routing.counts_on_host() == (0, 0)
    assert routing.num_rows == sum(round_up(count, 128) for count in counts)
    assert sized_as_on_a_gpu(indices, probs, 2, [0, 0], validate=True).host_counts == (0, 0)


def test_aligned_counts_are_accepted_and_wrong_ones_refused_when_validating():
    indices, probs = dispatch()
    true = build_routing(indices, probs, 5).host_counts
    aligned = [round_up(count, 128) for count in true]
    routing = sized_as_on_a_gpu(indices, probs, 5, aligned)
    assert routing.counts_on_host() == true
    probs = tensor(np.random.default_rng(0).random((300, 1)), torch.float32)
    single = tensor(np.random.default_rng(1).integers(0, 5, (300, 1)))
    with pytest.raises(RoutingError, match="tokens_per_expert"):
        sized_as_on_a_gpu(single, probs, 5, [1, 1, 1, 1, 1], validate=True)


def test_the_public_face():
    indices, probs = dispatch(3)
    routing = face.build_routing(indices, probs, 5)
    assert np.array_equal(
        numpy(routing.slot_row),
        numpy(face.deepep_topk_to_sonic_metadata(indices, probs, 5).slot_row),
    )
    back = numpy(face.scatter_to_slots(routing.row_prob, routing))
    routed = numpy(routing.slot_row) >= 0
    assert np.array_equal(back, np.where(routed, numpy(probs), 0))


def test_aggregate_refuses_what_it_cannot_sum():
    indices, probs = dispatch(4)
    routing = sized_as_on_a_gpu(indices, probs, 5)
    rows = tensor(np.zeros((routing.num_rows, 4)), torch.float32)
    with pytest.raises(ShapeError, match=rf"rows has shape .*needed: \[{routing.num_rows}, H\]"):
        aggregate(rows[1:], routing, weighted=True)
    with pytest.raises(DTypeError, match="rows is int64"):
        aggregate(rows.to(torch.int64), routing, weighted=True)
    with pytest.raises(DTypeError, match="dtype is float16 for rows of bfloat16"):
        aggregate(rows.to(torch.bfloat16), routing, weighted=True, dtype=torch.float16)


def broken(error):
    def make(device):
        raise error

    return make


class FakeKernels:
    name = "triton"


def log_lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "sonicmoe"]


def test_without_a_cuda_compiler_triton_takes_over_and_says_why(monkeypatch, caplog, fresh_choice):
    monkeypatch.setattr(backends, "_make_cuda", broken(ToolchainError("no nvcc\nmore lines")))
    monkeypatch.setattr(backends, "_make_triton", lambda device: FakeKernels())
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        assert [backends._choose("cuda:0").name for _ in range(3)] == ["triton"] * 3
    assert log_lines(caplog) == [
        "routing kernels on cuda:0: triton (CUDA kernels are unavailable: ToolchainError: no nvcc)"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_without_either_plain_operations_take_over_and_name_both_reasons(
    monkeypatch, caplog, fresh_choice
):
    monkeypatch.setattr(backends, "_make_cuda", broken(ToolchainError("no nvcc")))
    monkeypatch.setattr(backends, "_make_triton", broken(ImportError("no triton")))
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        assert backends._choose("cuda:0").name == "reference"
    (line,) = log_lines(caplog)
    assert "ToolchainError: no nvcc" in line
    assert "ImportError: no triton" in line


def test_a_forbidden_compile_is_never_answered_by_a_fallback(monkeypatch, fresh_choice):
    monkeypatch.setattr(backends, "_make_cuda", broken(CompileForbiddenError("forbidden")))
    monkeypatch.setattr(backends, "_make_triton", lambda device: FakeKernels())
    with pytest.raises(CompileForbiddenError):
        backends._choose("cuda:0")


def test_more_experts_than_the_kernels_take(caplog, fresh_choice):
    indices, probs = dispatch(5, tokens=20)
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        routing = sized_as_on_a_gpu(indices, probs, 600)
        sized_as_on_a_gpu(indices, probs, 600)
    assert routing.num_experts == 600
    (line,) = log_lines(caplog)
    assert "600 experts; the GPU kernels take at most 512" in line
