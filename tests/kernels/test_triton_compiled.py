"""The Triton kernels compile for Hopper without a GPU, one artefact per number of experts and none
per number of tokens.
"""

from __future__ import annotations

import importlib.util

import pytest
from framework import IS_PADDLE

if IS_PADDLE or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton under PyTorch", allow_module_level=True)

import triton.language as tl
from triton.runtime.jit import MockTensor

from sonicmoe.kernels import triton_aggregate, triton_routing

I32, I64, F32, BF16 = (MockTensor(dtype) for dtype in (tl.int32, tl.int64, tl.float32, tl.bfloat16))

ARCH = "sm_90a"


def requests(num_slots, experts, ids=I64):
    """Every kernel of a build, of the slot values and of the aggregation, as launched for so many
    slots.
    """
    expert_block, block = max(experts, 2), min(256, max(16, 8192 // max(experts, 2)))
    yield triton_routing._count.ahead(
        ids, I32, num_slots, num_slots // 7, experts, BLOCK=block, EXPERTS=expert_block, arch=ARCH
    )
    yield triton_routing._scan_programs.ahead(
        I32, I32, num_slots // 100, experts, BLOCK=256, arch=ARCH
    )
    yield triton_routing._write.ahead(
        ids, F32, I32, I32, I64, I32, I64, F32,
        num_slots, num_slots + 1000, num_slots // 7, 8, experts, 128, BLOCK=block, EXPERTS=expert_block, FILL=128, arch=ARCH,
    )  # fmt: skip
    yield triton_routing._place_sorted_rows.ahead(
        ids, F32, I32, I64, I32, I64, F32, num_slots, num_slots + 1000, experts, 128,
        WITH_PROBS=True, BLOCK=block, EXPERTS=expert_block, arch=ARCH,
    )  # fmt: skip
    yield triton_routing._gather_or_zero.ahead(
        I64, F32, F32, num_slots, num_slots + 3, BLOCK=1024, arch=ARCH
    )
    options = {"WEIGHTED": True, "COLUMNS": 1024, "enable_fp_fusion": False}
    yield triton_aggregate._aggregate.ahead(
        BF16, I64, F32, BF16, num_slots + 1000, 3072, 8, 3, **options, arch=ARCH
    )


@pytest.mark.kernels
def test_compiles_for_hopper(artefacts):
    for request in requests(65536, 512):
        artefact = request.compile(artefacts)
        assert any(name.endswith(".cubin") for name in artefact.manifest["files"])


def test_keys_do_not_depend_on_token_counts():
    first, same, other = (
        [request.key().digest for request in requests(*sizes)]
        for sizes in ((65536, 8), (101, 8), (65536, 16))
    )
    assert first == same and first[2] != other[2]
