"""What the border of routing accepts, and what it says once. What it refuses stands in tests/refusals."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe.errors import RoutingError, ShapeError
from sonicmoe.routing import validation
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.validation import host_counts_of

INDICES = np.array([[0, 2], [2, -1], [2, 0], [-1, 9]], np.int64)
COUNTS = [2, 0, 3]  # of three experts


def build(indices=INDICES, probs=None, num_experts=3, counts=None, **options):
    probs = np.full(indices.shape, 0.5, np.float32) if probs is None else probs
    return build_routing(
        tensor(indices), tensor(probs, torch.float32), num_experts, counts, **options
    )


class TestCounts:
    @pytest.mark.parametrize(
        "counts",
        [
            None, [], (), tuple(COUNTS), np.array(COUNTS), np.array(COUNTS, np.int32),
            tensor(COUNTS, torch.int32), tensor(COUNTS, torch.int64),
        ],
        ids=str,
    )  # fmt: skip
    def test_accepted(self, counts):
        assert build(counts=counts).host_counts == tuple(COUNTS)

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def test_accepts_exactly_the_true_and_the_aligned_counts(self, counts):
        aligned = [[-(-count // step) * step for count in COUNTS] for step in (1, 2, 4, 8, 16)]
        if counts in aligned:
            assert build(counts=counts).host_counts == tuple(COUNTS)
        else:
            with pytest.raises(RoutingError, match="tokens_per_expert"):
                build(counts=counts)

    @pytest.mark.parametrize("step", [1, 4, 8, 128])
    def test_aligned(self, step):
        counts = [-(-count // step) * step for count in COUNTS]
        assert build(counts=counts).host_counts == tuple(COUNTS)

    def test_counts_on_a_gpu_are_not_read_but_counted(self, monkeypatch):
        """More of them than experts are redundant slots, as MoonEP has."""
        monkeypatch.setattr(validation, "is_cuda", lambda _: True)
        assert host_counts_of(tensor(COUNTS), len(COUNTS)) is None
        with pytest.raises(ShapeError, match=r"tokens_per_expert has shape \(4,\); needed: \[3\]"):
            host_counts_of(tensor([1, 2, 3, 4]), 3)


def test_non_finite_probability_at_an_invalid_slot_is_fine():
    probs = np.full(INDICES.shape, 0.5, np.float32)
    probs[1, 1], probs[3, 0], probs[3, 1] = np.nan, np.inf, -np.inf
    assert np.isfinite(numpy(build(probs=probs, validate=True).row_prob)).all()


WHOLE = "no expert id of a batch of 2 tokens is in 0..2, and the largest is 7"
BEYOND = "the largest id of dispatched_indices is 14, and only 0..2 are"
SAID = {
    "ids of the whole model": ([[4, 7], [5, -1]], False, WHOLE),
    "some are here": (INDICES, False, None),
    "-1 marks others": (np.full((4, 2), -1), False, None),
    "E marks others": (np.full((4, 2), 3), False, None),
    "no token": (np.zeros((0, 2), np.int64), False, None),
    # Of some ids in range and some larger than E; E itself and -1 mean "not here".
    "beyond the marks": ([[0, 3], [-1, 14]], True, BEYOND),
    "the marks": ([[0, 3], [-1, 2]], True, None),
}


@pytest.mark.parametrize(("indices", "validate", "words"), SAID.values(), ids=SAID)
def test_ids_that_nobody_has_are_said_once(indices, validate, words, caplog):
    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        for _ in range(2):
            build(np.array(indices), validate=validate)
    assert [record.levelname for record in caplog.records] == (["WARNING"] if words else [])
    assert not words or words in caplog.messages[0]
