"""Run under TRITON_INTERPRET=1: the Triton kernels on the CPU against plain tensor operations.
`python -m kernels.interpreted CHECK...`.
"""

from __future__ import annotations

import sys

import torch
from kernels.routing_cases import (
    PLAIN,
    built_by,
    check_built,
    check_slot_values,
    check_sorted,
    check_sums,
    corpus,
    sorted_by,
)
from kernels.triton_interpreter import repair

repair()

from sonicmoe.routing.backends import TritonKernels  # noqa: E402

TRITON = TritonKernels()


def metadata_and_slot_values() -> int:
    """The interpreter takes a while per expert: 129 experts have the idle lanes of 511, and 512 are
    the most.
    """
    checked = 0
    for name, indices, experts in corpus():
        if experts in (256, 511):
            continue
        for dtype in (torch.int64, torch.int32):
            if dtype == torch.int32 and (name == "ids_past_32_bits" or experts > 32):
                continue
            ours = check_built(TRITON, indices.to(dtype), experts, name, 128 << (checked % 3))
            if dtype == torch.int64 and experts <= 64:
                check_slot_values(TRITON, ours, name)
            checked += 1
    return checked


def counts_too_small() -> int:
    """Rows that do not fit are dropped: nothing is written out of bounds, and no slot points there."""
    indices = torch.zeros((300, 1), dtype=torch.int64)
    for kernels in (TRITON, PLAIN):
        routing = built_by(kernels, indices, torch.ones(300, 1), 2, (127, 1))
        assert routing.num_rows == 256
        assert int(routing.slot_row.max()) == 255
        assert int((routing.slot_row < 0).sum()) == 44
        assert torch.equal(routing.row_token, torch.arange(256, dtype=torch.int32))
    return 1


def sorted_rows() -> int:
    """33 experts have the idle lanes of more, whose worst case the interpreter takes a minute for."""
    check_sorted(TRITON, torch.int64, "cpu", most=33)
    dropped = sorted_by(TRITON, torch.tensor([200, 1]), None, 201, (127, 1))
    assert dropped.num_rows == 256 and int(dropped.slot_row.max()) == 199
    return 1


def aggregation() -> int:
    indices = torch.randint(-3, 6, (40, 5), generator=torch.Generator().manual_seed(9))
    routing = check_built(TRITON, indices, 5)
    for width in (1, 24, 1030):
        for dtype in (torch.float32, torch.bfloat16):
            for weighted in (True, False):
                check_sums(TRITON, routing, width, dtype, weighted)
    return 1


CHECKS = {
    check.__name__: check
    for check in (metadata_and_slot_values, counts_too_small, sorted_rows, aggregation)
}

if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, CHECKS[check](), "checked")
