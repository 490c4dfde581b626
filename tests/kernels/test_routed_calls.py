"""Native functions read tensors of a routing straight from its memory, or get them as views."""

from __future__ import annotations

import itertools

import pytest
from engine.host_kernels import at
from framework import numpy, tensor, torch
from kernels.needs import NVCC

from sonicmoe.kernels import routing_metadata_source
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.calls import RoutedCall
from sonicmoe.routing.metadata import RoutingMetadata

pytestmark = NVCC
T, K, E = 7, 3, 5


@pytest.fixture(scope="module")
def native(artefacts):
    return routing_metadata_source("sm_90a").load(artefacts)


def routings(native):
    """The same routing in five tensors, and in one memory as the builder for a GPU has it."""
    indices = [[(token * 2 + slot) % (E + 1) for slot in range(K)] for token in range(T)]
    probs = [[0.25 * slot + token for slot in range(K)] for token in range(T)]
    made = build_routing(tensor(indices, torch.int64), tensor(probs, torch.float32), E)
    places = tuple(map(int, native.metadata_places(T * K, E, made.num_rows)))
    memory = torch.zeros((places[-1],), dtype=torch.uint8)
    held = RoutingMetadata.in_memory(made.sizes, memory, places)
    for field in RoutingMetadata.TENSOR_FIELDS:
        getattr(held, field).copy_(getattr(made, field))
    return made, RoutingMetadata.in_memory(made.sizes, memory, places)


@pytest.mark.parametrize("fields", [
    " ".join(fields) for n in (1, 3, 5)
    for fields in itertools.islice(itertools.permutations(RoutingMetadata.TENSOR_FIELDS, n), 5)
])  # fmt: skip
def test_the_tensors_stand_where_the_function_wants_them(native, fields):
    """No view of the framework is made of one memory."""
    given, found = [torch.ones((2, 3)), 5, None, 0.5], []

    def kernel(*arguments):
        # Copies: a native caller lends its tensors for the call.
        found.append([a if isinstance(a, int | float | None) else at(a).clone() for a in arguments])

    for position in (0, 2, 4):
        made, in_memory = routings(native)
        call = RoutedCall(kernel, position, fields, native.with_routing)
        call(in_memory, *given)
        assert not set(RoutingMetadata.TENSOR_FIELDS) & set(vars(in_memory))
        RoutedCall(lambda *all_: found.append(list(all_)), position, fields)(made, *given)
        bound, plain = found[-2:]
        assert plain[:position] + plain[len(plain) - 4 + position :] == given
        assert len(bound) == len(plain) == 4 + len(fields.split())
        for one, other in zip(bound, plain, strict=True):
            if isinstance(other, torch.Tensor):
                assert numpy(one).dtype == numpy(other).dtype
                assert (numpy(one) == numpy(other)).all() and one.shape == other.shape
            else:
                assert one == other


def test_a_routing_of_five_tensors_needs_no_memory(native):
    """As one that was checked, or that Triton has filled."""
    found = []
    made, _ = routings(native)
    call = RoutedCall(lambda *all_: found.append(all_), 1, "row_prob", native.with_routing)
    call(made, "first", "second")
    assert found[0][0] == "first" and found[0][1] is made.row_prob and found[0][2] == "second"


def test_what_does_not_fit_is_refused(native):
    _, in_memory = routings(native)
    tokens, topk, experts, _, rows = in_memory.sizes
    call = native.with_routing(lambda *_: None, ["row_prob"], 2)
    with pytest.raises(ValueError, match=r"memory of a routing has \d+ elements; needed: \d+"):
        call(in_memory.memory, tokens, topk, experts, rows + 128, 1, 2)
    with pytest.raises(TypeError, match="got 6 arguments"):
        call(in_memory.memory, tokens, topk, experts, rows, 1)
    with pytest.raises(ValueError, match="a routing has no prob"):
        native.with_routing(lambda *_: None, ["prob"], 0)
