"""The Python faces of the routing kernels where no GPU is needed: sizes and counts."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe.ernie_compat import deepep_topk_metadata_cuda as face
from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.routing.build import build_routing, num_rows_bound
from sonicmoe.routing.combine import aggregate
from sonicmoe.routing.metadata import round_up


def sized_as_on_a_gpu(*arguments, **options):
    return build_routing(*arguments, static_rows=True, **options)


def dispatch(seed=0, tokens=300, topk=3, experts=5):
    rng = np.random.default_rng(seed)
    indices = tensor(rng.integers(-1, experts + 1, (tokens, topk)))
    return indices, tensor(rng.random((tokens, topk)), torch.float32)


@pytest.mark.parametrize("alignment", [128, 256])
def test_host_tensors_give_the_reference_and_padding(alignment):
    indices, probs = dispatch()
    want = face.build_routing(indices, probs, 5, alignment=alignment)
    exact = sized_as_on_a_gpu(indices, probs, 5, list(want.host_counts), alignment=alignment)
    assert exact.num_rows == want.num_rows
    worst = sized_as_on_a_gpu(indices, probs, 5, alignment=alignment)
    assert worst.num_rows == num_rows_bound(900, 5, alignment) >= want.num_rows
    same = face.deepep_topk_to_sonic_metadata(indices, probs, 5, alignment=alignment)
    for name in want.TENSOR_FIELDS:
        assert np.array_equal(numpy(getattr(same, name)), numpy(getattr(want, name))), name
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
    assert bound <= sum(counts) + invalid + len(counts) * (alignment - 1)


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


def test_aggregate_refuses_what_it_cannot_sum():
    indices, probs = dispatch(4)
    routing = sized_as_on_a_gpu(indices, probs, 5)
    rows = tensor(np.zeros((routing.num_rows, 4)), torch.float32)
    shape = rf"rows has shape .*needed: \[{routing.num_rows}, H\]"
    other = {"dtype": torch.float16}
    for wrong, options, error, words in (
        (rows[1:], {}, ShapeError, shape),
        (rows.to(torch.int64), {}, DTypeError, "rows is int64"),
        (rows.to(torch.bfloat16), other, DTypeError, "dtype is float16 for rows of bfloat16"),
    ):
        with pytest.raises(error, match=words):
            aggregate(wrong, routing, weighted=True, **options)
