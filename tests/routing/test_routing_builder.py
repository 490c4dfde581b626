"""`build_routing` against a naive builder, on every kind of input the routing contract calls ordinary; and
metadata of rows that lie in expert order: from counts alone, equal to that of the ids which the counts
stand for. Repeats and strides are a law and an axis of tests/oracle.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routing.naive_builder import naive_routing

from sonicmoe.routing.build import build_routing, build_sorted_routing, num_rows_bound
from sonicmoe.routing.metadata import RoutingMetadata

DTYPES = {
    "expert_counts": torch.int32,
    "padded_offsets": torch.int64,
    "row_token": torch.int32,
    "slot_row": torch.int64,
    "row_prob": torch.float32,
}
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def distinct_probs(indices, num_experts):
    """A different probability in every slot, so that no permutation goes unnoticed; NaN where nothing
    is routed.
    """
    number = np.arange(indices.size, dtype=np.float32).reshape(indices.shape)
    probs = (1 + number) / np.float32(indices.size + 1)
    here = (indices >= 0) & (indices < num_experts)
    return np.where(here, probs, np.float32(np.nan)).astype(np.float32)


def build(indices, probs, num_experts, counts=None, **options):
    """In fresh memory that is full of NaN, for which PyTorch has a switch."""
    given = tensor(indices), tensor(probs, torch.float32), num_experts, counts
    if IS_PADDLE:
        return build_routing(*given, **options)
    from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan

    with memory_full_of_nan("cpu"):
        return build_routing(*given, **options)


def assert_equals_naive(metadata: RoutingMetadata, expected: dict) -> None:
    for name in ("num_tokens", "topk", "num_experts", "alignment", "num_rows", "host_counts"):
        assert getattr(metadata, name) == expected[name], name
    for name, dtype in DTYPES.items():
        actual = getattr(metadata, name)
        assert actual.dtype == dtype, name
        want = np.asarray(expected[name], dtype=np.float64 if name == "row_prob" else np.int64)
        if name == "slot_row":
            want = want.reshape(expected["num_tokens"], expected["topk"])
        np.testing.assert_array_equal(numpy(actual), want, err_msg=name)


def check(indices, num_experts, alignment=128, counts=None):
    probs = distinct_probs(indices, num_experts)
    metadata = build(indices, probs, num_experts, counts, alignment=alignment)
    assert_equals_naive(metadata, naive_routing(indices, probs, num_experts, alignment))
    return metadata


@st.composite
def dispatches(draw):
    """`(indices, num_experts, alignment)`; ids of every kind in every position, repeated ids
    included.
    """
    num_experts = draw(st.integers(1, 6))
    topk = draw(st.integers(1, 8))
    num_tokens = draw(st.integers(0, 12))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    limits = np.iinfo(dtype)
    odd = st.sampled_from(
        [-1, -2, -7, num_experts, num_experts + 1, 1000, int(limits.max), int(limits.min)]
    )
    ids = st.one_of(st.integers(0, num_experts - 1), odd)
    flat = draw(st.lists(ids, min_size=num_tokens * topk, max_size=num_tokens * topk))
    indices = np.asarray(flat, dtype=dtype).reshape(num_tokens, topk)
    return indices, num_experts, draw(st.sampled_from([128, 256, 512]))


@EXAMPLES
@given(dispatches())
@example((np.zeros((0, 1), np.int64), 1, 128))
@example((np.full((3, 2), -1, np.int32), 4, 256))
def test_equals_the_naive_builder(dispatch):
    check(*dispatch)


@pytest.mark.parametrize("alignment", [128, 256, 512])
@pytest.mark.parametrize(
    "counts", [(0, 1, 127, 128, 129), (129, 0, 0, 0, 128), (0, 0, 0, 0, 1), (127, 127, 1, 1, 0)]
)
def test_counts_around_the_tile(counts, alignment):
    rng = np.random.default_rng(sum(counts))
    experts = np.repeat(np.arange(len(counts)), counts)
    indices = rng.permutation(experts).reshape(-1, 1).astype(np.int32)
    metadata = check(indices, len(counts), alignment, list(counts))
    assert metadata.counts_on_host() == counts
    assert metadata.num_rows == sum(-(-count // alignment) * alignment for count in counts)


def test_counts_on_host_reads_the_tensor_when_the_builder_did_not_know():
    metadata = build(np.array([[0], [2], [2]]), np.ones((3, 1), np.float32), 3)
    names = "num_tokens", "topk", "num_experts", "alignment", "num_rows"
    numbers = {name: getattr(metadata, name) for name in names}
    tensors = dict(zip(RoutingMetadata.TENSOR_FIELDS, metadata.tensors(), strict=True))
    blind = RoutingMetadata(**numbers, **tensors)
    assert blind.host_counts is None
    assert blind.counts_on_host() == (1, 0, 2)
    slices = [(0, 1, 128), (128, 0, 0), (128, 2, 128)]
    assert blind.expert_slices() == metadata.expert_slices() == slices


# ---- rows in expert order ----


def ids_of(counts, num_tokens):
    """The expert of each row, one column; -1 beyond the sum."""
    ids = np.full((num_tokens, 1), -1, np.int64)
    named = np.repeat(np.arange(len(counts)), counts)
    ids[: len(named), 0] = named
    return ids


@EXAMPLES
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=9),
    st.integers(0, 300),
    st.sampled_from([128, 256]),
    st.sampled_from([torch.int32, torch.int64]),
)
@example([0, 0, 0], 0, 128, torch.int64)
@example([0, 128, 0, 129, 0], 0, 128, torch.int32)
@example([0], 7, 128, torch.int64)
def test_sorted_rows_equal_the_naive_builder(counts, beyond, alignment, dtype):
    num_tokens = sum(counts) + beyond
    probs = np.arange(1, num_tokens + 1, dtype=np.float32)
    probs[sum(counts) :] = np.nan  # nobody reads the rows beyond
    given = tensor(np.array(counts), dtype), num_tokens
    for held, values in ((tensor(probs, torch.float32), probs), (None, np.ones_like(probs))):
        found = build_sorted_routing(*given, held, alignment=alignment)
        ids = ids_of(counts, num_tokens)
        wanted = naive_routing(ids, values[:, None], len(counts), alignment)
        assert_equals_naive(found, wanted)


@pytest.mark.parametrize("on_host", [None, [3, 0, 130]])
def test_sorted_rows_of_a_gpu(on_host):
    """As many as any counts need, or as the counts on the host say."""
    counts = tensor(np.array([3, 0, 130]), torch.int64)
    routing = build_sorted_routing(counts, 140, tokens_per_expert=on_host, static_rows=True)
    assert routing.num_rows == num_rows_bound(140, 3, 128, on_host)
    exact = build_sorted_routing(counts, 140)
    for name in exact.TENSOR_FIELDS:
        longer, wanted = numpy(getattr(routing, name)), numpy(getattr(exact, name))
        assert (longer[: len(wanted)] == wanted).all(), name
        assert (longer[len(wanted) :] == (0 if name == "row_prob" else -1)).all(), name
