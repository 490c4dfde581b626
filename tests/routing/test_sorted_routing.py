"""Metadata of rows that lie in expert order: from counts alone, equal to that of the ids which the
counts stand for.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routing.naive_builder import naive_routing

from sonicmoe.routing.build import build_sorted_routing, num_rows_bound


def ids_of(counts, num_tokens):
    """The expert of each row, one column; -1 beyond the sum."""
    ids = np.full((num_tokens, 1), -1, np.int64)
    named = np.repeat(np.arange(len(counts)), counts)
    ids[: len(named), 0] = named
    return ids


def assert_is_naive(routing, counts, num_tokens, probs, alignment=128):
    wanted = naive_routing(ids_of(counts, num_tokens), probs, len(counts), alignment)
    for name, value in wanted.items():
        got = getattr(routing, name)
        got = got if isinstance(got, int | tuple) else numpy(got).tolist()
        assert got == value, name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=9),
    st.integers(0, 300),
    st.sampled_from([128, 256]),
    st.sampled_from([torch.int32, torch.int64]),
)
@example([0, 0, 0], 0, 128, torch.int64)
@example([0, 128, 0, 129, 0], 0, 128, torch.int32)
@example([0], 7, 128, torch.int64)
def test_equals_the_naive_builder(counts, beyond, alignment, dtype):
    num_tokens = sum(counts) + beyond
    probs = np.arange(1, num_tokens + 1, dtype=np.float32)
    probs[sum(counts) :] = np.nan  # nobody reads the rows beyond
    given_counts = tensor(np.array(counts), dtype)
    weighted = build_sorted_routing(
        given_counts, num_tokens, tensor(probs, torch.float32), alignment=alignment
    )
    assert_is_naive(weighted, counts, num_tokens, probs[:, None], alignment)
    plain = build_sorted_routing(given_counts, num_tokens, alignment=alignment)
    assert_is_naive(plain, counts, num_tokens, np.ones((num_tokens, 1), np.float32), alignment)


@pytest.mark.parametrize("on_host", [None, [3, 0, 130]])
def test_rows_of_a_gpu(on_host):
    """As many as any counts need, or as the counts on the host say."""
    counts = tensor(np.array([3, 0, 130]), torch.int64)
    routing = build_sorted_routing(counts, 140, tokens_per_expert=on_host, static_rows=True)
    assert routing.num_rows == num_rows_bound(140, 3, 128, on_host)
    exact = build_sorted_routing(counts, 140)
    for name in exact.TENSOR_FIELDS:
        longer, wanted = numpy(getattr(routing, name)), numpy(getattr(exact, name))
        assert (longer[: len(wanted)] == wanted).all(), name
        assert (longer[len(wanted) :] == (0 if name == "row_prob" else -1)).all(), name
