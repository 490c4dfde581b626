"""The border of routing: what is refused, and that the message names the place."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe.ernie_compat import deepep_topk_to_sonic_metadata
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
            None, [], (), COUNTS, tuple(COUNTS), [8, 0, 8], [128, 0, 128], [4, 0, 4],
            np.array(COUNTS), np.array(COUNTS, np.int32), tensor(COUNTS, torch.int32),
            tensor(COUNTS, torch.int64),
        ],
        ids=str,
    )  # fmt: skip
    def test_accepted(self, counts):
        assert build(counts=counts).host_counts == tuple(COUNTS)

    @pytest.mark.parametrize(
        ("counts", "expert", "given_count", "counted"),
        [
            ([2, 0, 2], 2, 2, 3), ([3, 0, 3], 0, 3, 2), ([2, 1, 3], 1, 1, 0),
            ([8, 8, 8], 0, 8, 2), ([8, 0, 3], 0, 8, 2), ([6, 0, 6], 0, 6, 2),
        ],
    )  # fmt: skip
    def test_disagreement_names_expert_and_both_counts(self, counts, expert, given_count, counted):
        message = rf"tokens_per_expert\[{expert}\] is {given_count} but .* {counted} tokens for expert {expert}"
        with pytest.raises(RoutingError, match=message) as caught:
            build(counts=counts)
        assert str(counts) in str(caught.value)
        assert str(COUNTS) in str(caught.value)

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def test_accepts_exactly_the_true_and_the_aligned_counts(self, counts):
        aligned = [[-(-count // step) * step for count in COUNTS] for step in (1, 2, 4, 8, 16)]
        if counts in aligned:
            assert build(counts=counts).host_counts == tuple(COUNTS)
        else:
            with pytest.raises(RoutingError, match="tokens_per_expert"):
                build(counts=counts)

    def test_counts_on_a_gpu_are_not_read_but_counted(self, monkeypatch):
        """More of them than experts are redundant slots, as MoonEP has."""
        monkeypatch.setattr(validation, "is_cuda", lambda _: True)
        assert host_counts_of(tensor(COUNTS), len(COUNTS)) is None
        with pytest.raises(ShapeError, match=r"tokens_per_expert has shape \(4,\); needed: \[3\]"):
            host_counts_of(tensor([1, 2, 3, 4]), 3)


class TestContents:
    @pytest.mark.parametrize("slots", [(0, 1), (0, 3), (1, 2), (2, 3)])
    def test_an_expert_twice_in_a_row_is_named(self, slots):
        indices = np.tile(np.array([0, 1, 2, 3], np.int64), (6, 1))
        indices[4, slots[1]] = indices[4, slots[0]]
        words = rf"token 4 names expert {slots[0]} twice \(slots {slots[0]} and {slots[1]}\)"
        with pytest.raises(RoutingError, match=words):
            build(indices, num_experts=4, validate=True)
        # Without validation it is not looked for.
        assert build(indices, num_experts=4).host_counts is not None

    def test_ids_of_the_whole_model_are_recognised(self):
        indices = np.array([[8, 9], [-1, 14]], np.int64)
        words = r"no id of dispatched_indices is in 0\.\.3, and the largest is 14; needed: ids"
        with pytest.raises(RoutingError, match=words):
            build(indices, num_experts=4, validate=True)
        assert build(indices, num_experts=4).num_rows == 0, "without validation all are elsewhere"
        # No expert here, in either way of saying it.
        build(np.array([[4, -1], [-1, 4]], np.int64), num_experts=4, validate=True)

    def test_ids_beyond_the_marks_are_said_once(self, caplog):
        """Of some ids in range and some larger than E; E itself and -1 mean "not here"."""
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            build(np.array([[0, 4], [-1, 3]], np.int64), num_experts=4, validate=True)
            assert not caplog.records
            for _ in range(2):
                build(np.array([[0, 4], [-1, 14]], np.int64), num_experts=4, validate=True)
        (record,) = caplog.records
        assert "the largest id of dispatched_indices is 14, and only 0..3 are" in record.message

    def test_non_finite_probability_at_an_invalid_slot_is_fine(self):
        probs = np.full(INDICES.shape, 0.5, np.float32)
        probs[1, 1], probs[3, 0], probs[3, 1] = np.nan, np.inf, -np.inf
        assert np.isfinite(numpy(build(probs=probs, validate=True).row_prob)).all()

    @pytest.mark.parametrize("value", [-2, -128, -(2**31)])
    def test_id_below_minus_one_is_named(self, value):
        indices = INDICES.copy()
        indices[3, 1] = value
        with pytest.raises(
            RoutingError, match=rf"dispatched_indices of token 3, slot 1, is {value}"
        ):
            build(indices, validate=True)
        assert build(indices).host_counts == tuple(COUNTS)


PAIR = {
    "dispatched_indices": tensor(INDICES),
    "dispatched_probs": tensor(np.zeros((4, 2)), torch.float32),
}


class TestShapesAndDtypes:
    @pytest.mark.parametrize("name", ["dispatched_indices", "dispatched_probs"])
    @pytest.mark.parametrize("shape", [(4,), (4, 2, 1), ()])
    def test_rank(self, name, shape):
        words = rf"{name} has shape .*needed: \[tokens, topk\]"
        changed = tensor(np.zeros(shape), PAIR[name].dtype)
        with pytest.raises(ShapeError, match=words) as caught:
            build_routing(*(PAIR | {name: changed}).values(), 3)
        assert ("HybridEP" in str(caught.value)) == (len(shape) == 1)


class TestPublicFace:
    """`sonicmoe.ernie_compat.deepep_topk_to_sonic_metadata`."""

    TWICE = np.array([[0, 1], [1, 1]], np.int64)

    def face(self, indices=INDICES, counts=None, **options):
        probs = tensor(np.full(indices.shape, 0.5), torch.float32)
        return deepep_topk_to_sonic_metadata(tensor(indices), probs, 3, counts, **options)

    @pytest.mark.parametrize("alignment", [128, 256])
    def test_is_the_builder(self, alignment):
        ours, reference = self.face(counts=COUNTS, alignment=alignment), build(alignment=alignment)
        assert ours.host_counts == reference.host_counts
        for one, other in zip(ours.tensors(), reference.tensors(), strict=True):
            assert np.array_equal(numpy(one), numpy(other))

    def test_environment_switches_validation(self, set_flags):
        self.face(self.TWICE)
        set_flags(SONIC_MOE_VALIDATE_DISPATCH="1")
        with pytest.raises(RoutingError, match="token 1 names expert 1 twice"):
            self.face(self.TWICE)


class TestGlobalIds:
    """On a host a batch of ids of the whole model is named once; its output is zeros."""

    def test_ids_of_the_whole_model_are_named_once(self, caplog):
        for _ in range(2):
            build(np.array([[4, 7], [5, -1]]))
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        words = "no expert id of a batch of 2 tokens is in 0..2, and the largest is 7"
        assert words in record.message

    @pytest.mark.parametrize(
        "indices",
        [INDICES, np.full((4, 2), -1), np.full((4, 2), 3), np.zeros((0, 2), np.int64)],
        ids=["some are here", "-1 marks others", "E marks others", "no token"],
    )
    def test_other_batches_are_not(self, caplog, indices):
        build(indices)
        assert caplog.records == []
