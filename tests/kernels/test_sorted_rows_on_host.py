"""The CUDA kernel that places rows in expert order, compiled for the host, against plain tensor
operations bit for bit, in memory that held other bytes before.
"""

from __future__ import annotations

import pytest
import torch
from kernels import host_cuda
from kernels.needs import HOST_MODULE
from kernels.routing_cases import distinct_probs, sorted_by, sorted_corpus

from sonicmoe.kernels import routing_metadata_source
from sonicmoe.routing.backends import PlainKernels
from sonicmoe.routing.metadata import RoutingMetadata

pytestmark = HOST_MODULE


@pytest.fixture(scope="module")
def build_sorted(artefacts):
    # The other file of the module asks for a barrier of the grid, which the host does not have.
    source = routing_metadata_source("sm_90a").files[1]
    return host_cuda.load("host_sorted_rows", (source,), artefacts).build_sorted


def placed(build_sorted, counts, probs, like):
    """By the kernel, in one memory that was filled with 0xA5; `like` has the sizes."""
    sizes, first, places = dict(zip(like.TENSOR_FIELDS, like.tensors(), strict=True)), 0, []
    for tensor in sizes.values():
        places.append(first)
        first += -(-tensor.numel() * tensor.element_size() // 128) * 128
    whole = torch.full((first + 128,), 0xA5, dtype=torch.uint8)
    memory = whole[-whole.data_ptr() % 16 :][:first]
    build_sorted(counts, probs, memory, like.num_tokens, like.num_rows, like.alignment, 0)
    return RoutingMetadata.in_memory(like.sizes, memory, (*places, first))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_plain_operations(build_sorted, dtype):
    for name, wide, tokens in sorted_corpus():
        counts = wide.clamp(max=2**31 - 1).to(dtype)
        probs = distinct_probs(torch.zeros(tokens, 1), 1).reshape(-1)
        for given in (probs, None):
            wanted = sorted_by(PlainKernels(), counts, given, tokens)
            ours = placed(build_sorted, counts, given, wanted)
            for field in wanted.TENSOR_FIELDS:
                assert torch.equal(getattr(ours, field), getattr(wanted, field)), (name, field)


def test_rows_that_do_not_fit_are_dropped(build_sorted):
    wanted = sorted_by(PlainKernels(), torch.tensor([200, 1]), None, 201, (127, 1))
    ours = placed(build_sorted, torch.tensor([200, 1]), None, wanted)
    assert torch.equal(ours.slot_row, wanted.slot_row) and int(ours.slot_row.max()) == 199
