"""`build_routing` against a naive builder, on every kind of input the routing contract calls
ordinary.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routing.naive_builder import naive_routing

from sonicmoe.routing.build import build_routing
from sonicmoe.routing.metadata import RoutingMetadata

DTYPES = {
    "expert_counts": torch.int32,
    "padded_offsets": torch.int64,
    "row_token": torch.int32,
    "slot_row": torch.int64,
    "row_prob": torch.float32,
}
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def distinct_probs(indices, num_experts, invalid=np.nan):
    """A different probability in every slot, so that no permutation goes unnoticed; `invalid` where
    nothing is routed.
    """
    number = np.arange(indices.size, dtype=np.float32).reshape(indices.shape)
    probs = (1 + number) / np.float32(indices.size + 1)
    here = (indices >= 0) & (indices < num_experts)
    return np.where(here, probs, np.float32(invalid)).astype(np.float32)


def build(indices, probs, num_experts, counts=None, **options):
    return build_routing(
        tensor(indices), tensor(probs, torch.float32), num_experts, counts, **options
    )


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


def test_invalid_slots_decide_by_index_not_by_probability():
    indices = np.array([[0, -1], [1, 0]], np.int64)
    metadata = build(indices, np.array([[0.0, 0.7], [0.0, 0.0]], np.float32), 2)
    assert metadata.host_counts == (2, 1)
    assert (numpy(metadata.slot_row)[0, 0], numpy(metadata.slot_row)[0, 1]) == (0, -1)


def test_repeated_builds_are_equal_and_inputs_stay():
    rng = np.random.default_rng(0)
    indices = tensor(rng.integers(-1, 6, (200, 4)))
    probs = tensor(rng.random((200, 4)), torch.float32)
    before = numpy(indices).copy(), numpy(probs).copy()
    first, second = build_routing(indices, probs, 5), build_routing(indices, probs, 5)
    for one, other in zip(first.tensors(), second.tensors(), strict=True):
        assert np.array_equal(numpy(one), numpy(other))
    assert np.array_equal(numpy(indices), before[0])
    assert np.array_equal(numpy(probs), before[1])


def test_non_contiguous_inputs():
    rng = np.random.default_rng(1)
    indices, probs = rng.integers(-1, 5, (3, 40)), rng.random((3, 40)).astype(np.float32)
    turned = tensor(indices).transpose(0, 1), tensor(probs, torch.float32).transpose(0, 1)
    metadata = build_routing(*turned, 4)
    assert_equals_naive(metadata, naive_routing(indices.T, probs.T, 4, 128))


@pytest.mark.skipif(
    IS_PADDLE,
    reason="PyTorch's switch that fills uninitialised memory with NaN and the largest integers",
)
def test_every_element_is_written():
    indices = np.random.default_rng(3).integers(-1, 5, (130, 2))
    probs = distinct_probs(indices, 4)
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.isnan(torch.empty(7)).all()), "the poison is not active"
        metadata = build(indices, probs, 4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equals_naive(metadata, naive_routing(indices, probs, 4, 128))


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
