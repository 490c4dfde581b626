"""Names of Fleet's in-tree copy of `run_sonic_moe`: the metadata tuple against its definition, element
by element and in plain loops, and what can be bound and not used.
"""

from __future__ import annotations

import numpy as np
import pytest
from fleet.naive_metadata import by_definition, drawn
from framework import IS_PADDLE, numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe.errors import DTypeError, EngineUnavailableError, RoutingError, ShapeError
from sonicmoe.fleet.twin import (
    DownProjection,
    UpProjection,
    attach_preallocated_gated_outputs,
    deepep_topk_to_sonic_metadata,
    deepep_topk_to_sonic_metadata_with_scales,
    differentiable_router_scores,
    scatter_router_scores_i32,
)


def as_tensors(indices, probs, dtype=torch.int32):
    return tensor(indices, dtype), tensor(probs, torch.float32)


def check(result, wanted):
    assert len(result) == len(wanted) == 10
    for position, (found, value) in enumerate(zip(result, wanted, strict=True)):
        if value is None or isinstance(value, int):
            assert type(found) is type(value) and found == value, position
        else:
            dtype = "float32" if position == 5 else "int32"
            assert str(found.dtype).endswith(dtype), position
            assert tuple(found.shape) == (len(value),), position
            assert np.array_equal(numpy(found), np.asarray(value, np.float64)), position


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    topk=st.integers(1, 4),
    experts=st.integers(1, 5),
    block=st.sampled_from([1, 2, 4, 128]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_every_element_is_as_defined(tokens, topk, experts, block, share, seed):
    indices, probs = drawn(tokens, topk, experts, seed, share)
    counts = [int((indices == e).sum()) for e in range(experts)]
    wanted = by_definition(indices, probs, experts, block)
    for given_counts in (counts, None, []):
        result = deepep_topk_to_sonic_metadata(
            *as_tensors(indices, probs), given_counts, experts, block=block
        )
        check(result, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_other_ranks_and_both_index_dtypes(dtype):
    indices, probs = drawn(7, 3, 4, 1)
    foreign = indices.copy()
    foreign[foreign == -1] = 9  # an id that is not here has many spellings
    result = deepep_topk_to_sonic_metadata(*as_tensors(foreign, probs, dtype), None, 4)
    check(result, by_definition(indices, probs, 4, 128))


def test_no_element_belongs_to_the_graph():
    indices, probs = drawn(5, 2, 3, 0)
    leaf = tensor(probs, torch.float32, grad=True)
    result = deepep_topk_to_sonic_metadata(tensor(indices, torch.int32), leaf, None, 3)
    scores = result[5]
    assert scores.stop_gradient if IS_PADDLE else not scores.requires_grad


def test_wrong_counts_and_blocks_are_refused():
    pair = as_tensors(*drawn(6, 2, 3, 0, share=1.0))
    with pytest.raises(RoutingError, match=r"tokens_per_expert\[0\] is 99"):
        deepep_topk_to_sonic_metadata(*pair, [99, 0, 0], 3, block=1)
    for block in (0, -1, 1.0):
        with pytest.raises(RoutingError, match=r"block is .*; needed: an int >= 1"):
            deepep_topk_to_sonic_metadata(*pair, None, 3, block=block)
    with pytest.raises(DTypeError, match="dispatched_probs"):
        deepep_topk_to_sonic_metadata(pair[0], pair[1].to(torch.bfloat16), None, 3)


class TestWithScales:
    @pytest.mark.parametrize(
        ("columns", "shape", "dtype"),
        [
            (256, (6, 2), torch.int32),
            (256, (6, 8), torch.uint8),
            (96, (6, 3), torch.int32),
            (256, (6, 1), torch.float32),
        ],
    )
    def test_every_carrier_is_taken_and_nothing_is_packed(self, columns, shape, dtype):
        indices, probs = drawn(6, 2, 3, 0)
        scales = tensor(np.zeros(shape), torch.float32).to(dtype)
        result = deepep_topk_to_sonic_metadata_with_scales(
            *as_tensors(indices, probs), None, 3, scales, columns, block=128,
            gated_output_prototype=scales, gated_n=256, gated_preact_bf16=True,
            gated_allocate_z_scale=False,
        )  # fmt: skip
        check(result[:10], by_definition(indices, probs, 3, 128))
        assert result[10:] == (None,)

    @pytest.mark.parametrize("shape", [(5, 2), (6, 3), (6,), (6, 16)])
    def test_scales_of_other_tokens_are_refused(self, shape):
        pair = as_tensors(*drawn(6, 2, 3, 0))
        with pytest.raises(
            ShapeError, match=r"raw_scales has shape .*; needed: \(6, 8\), or \(6, 2\)"
        ):
            deepep_topk_to_sonic_metadata_with_scales(
                *pair, None, 3, tensor(np.zeros(shape), torch.int32), 256
            )


class TestScores:
    @pytest.mark.parametrize("given_source", [True, False])
    def test_are_those_of_the_metadata_and_their_gradient_goes_to_the_slots(self, given_source):
        indices, probs = drawn(7, 3, 4, 2)
        ids = tensor(indices, torch.int32)
        leaf = tensor(probs, torch.float32, grad=True)
        found = deepep_topk_to_sonic_metadata(ids, leaf, None, 4, block=4)
        rows, padding, source = found[6], found[7], found[9]
        scores = differentiable_router_scores(
            leaf, ids, found[4], rows - padding, rows, 4, source if given_source else None
        )
        assert np.array_equal(numpy(scores), numpy(found[5]))
        weights = np.arange(1, rows + 1, dtype=np.float32)
        (scores * tensor(weights, torch.float32)).sum().backward()
        wanted = np.zeros(indices.size)
        wanted[numpy(source)] = weights[: rows - padding]
        assert np.array_equal(numpy(leaf.grad).ravel(), wanted)
        scattered = scatter_router_scores_i32(tensor(weights), source, indices.size)
        assert np.array_equal(numpy(scattered), wanted)

    def test_of_no_slot(self):
        ids, leaf = tensor(np.full((3, 2), -1), torch.int32), tensor(np.ones((3, 2)), torch.float32)
        assert numpy(differentiable_router_scores(leaf, ids, None, 0, 0, 2)).shape == (0,)
        nothing = tensor(np.zeros(0), torch.float32)
        empty = scatter_router_scores_i32(nothing, nothing.to(torch.int32), 6)
        assert np.array_equal(numpy(empty), np.zeros(6))

    def test_a_wrong_number_is_named(self):
        ids, leaf = tensor([[0, 1]], torch.int32), tensor([[0.5, 0.5]], torch.float32)
        with pytest.raises(ShapeError, match="TK is 1 and TK_padded 4; needed: 2"):
            differentiable_router_scores(leaf, ids, None, 1, 4, 2)
        with pytest.raises(ShapeError, match="scores has 1 elements for 2 indices"):
            scatter_router_scores_i32(leaf.reshape([-1])[:1], ids.reshape([-1]), 2)


@pytest.mark.parametrize("name", [UpProjection, DownProjection, attach_preallocated_gated_outputs])
@pytest.mark.parametrize("way", [lambda it: it.apply, lambda it: it])
def test_parts_of_the_copy_can_be_bound_and_not_used(name, way):
    with pytest.raises(EngineUnavailableError, match=rf"{name._name} .*call .*run_sonic_moe"):
        way(name)(tensor(np.zeros(3)), fp8_config=None)
