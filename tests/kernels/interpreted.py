"""Run under TRITON_INTERPRET=1: the Triton kernels on the CPU against plain tensor operations.
`python -m kernels.interpreted CHECK...`.
"""

from __future__ import annotations

import sys

import torch
from kernels.routing_cases import (
    built_by,
    corpus,
    distinct_probs,
    moved_by,
    sorted_by,
    sorted_corpus,
    summed_by,
)
from kernels.triton_interpreter import repair

repair()

from sonicmoe.routing.backends import PlainKernels, TritonKernels  # noqa: E402

TRITON, PLAIN = TritonKernels(), PlainKernels()


def both(indices, probs, num_experts, counts=None, alignment=128):
    return [
        built_by(kernels, indices, probs, num_experts, counts, alignment)
        for kernels in (TRITON, PLAIN)
    ]


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
            given = indices.to(dtype), distinct_probs(indices, experts), experts
            ours, plain = both(*given, alignment=128 << (checked % 3))
            for field, one, other in zip(
                ours.TENSOR_FIELDS, ours.tensors(), plain.tensors(), strict=True
            ):
                assert one.dtype == other.dtype, (name, field)
                assert torch.equal(one, other), (name, field)
            if dtype == torch.int64 and experts <= 64:
                slot_values(name, indices, ours)
            checked += 1
    return checked


def counts_too_small() -> int:
    """Rows that do not fit are dropped: nothing is written out of bounds, and no slot points there."""
    indices = torch.zeros((300, 1), dtype=torch.int64)
    for routing in both(indices, torch.ones(300, 1), 2, (127, 1)):
        assert routing.num_rows == 256
        assert int(routing.slot_row.max()) == 255
        assert int((routing.slot_row < 0).sum()) == 44
        assert torch.equal(routing.row_slot, torch.arange(256))
    return 1


def sorted_rows() -> int:
    """Rows in expert order, with probabilities and without. 33 experts have the idle lanes of more,
    whose worst case the interpreter takes a minute for.
    """
    for name, counts, tokens in sorted_corpus():
        if counts.numel() > 33:
            continue
        probs = distinct_probs(torch.zeros(tokens, 1), 1).reshape(-1)
        for given in (probs, None):
            ours, plain = (sorted_by(kernels, counts, given, tokens) for kernels in (TRITON, PLAIN))
            for field, one, other in zip(
                ours.TENSOR_FIELDS, ours.tensors(), plain.tensors(), strict=True
            ):
                assert torch.equal(one, other), (name, field)
    dropped = sorted_by(TRITON, torch.tensor([200, 1]), None, 201, (127, 1))
    assert dropped.num_rows == 256 and int(dropped.slot_row.max()) == 199
    return 1


def slot_values(name, indices, ours) -> None:
    slots = torch.randn(tuple(indices.shape), generator=torch.Generator().manual_seed(7))
    rows = torch.randn(ours.num_rows, generator=torch.Generator().manual_seed(8))
    rows[ours.row_slot < 0] = float("nan")
    flat = slots.reshape(-1)
    moved, wanted = (moved_by(kernels, flat, ours.row_slot) for kernels in (TRITON, PLAIN))
    assert torch.equal(moved, wanted), name
    ds = moved_by(TRITON, rows, ours.slot_row)
    assert torch.equal(ds, moved_by(PLAIN, rows, ours.slot_row)), name
    assert bool((ds[ours.slot_row < 0] == 0).all()), name


def aggregation() -> int:
    generator = torch.Generator().manual_seed(9)
    indices = torch.randint(-3, 6, (40, 5), generator=generator)
    routing, _ = both(indices, distinct_probs(indices, 5), 5)
    for width in (1, 24, 1030):
        exact = torch.randn(routing.num_rows, width, generator=generator)
        exact[routing.row_slot < 0] = float("nan")
        for dtype in (torch.float32, torch.bfloat16):
            for weighted in (True, False):
                rows = exact.to(dtype)
                ours = summed_by(TRITON, rows, routing, weighted=weighted)
                plain = summed_by(PLAIN, rows, routing, weighted=weighted)
                assert torch.equal(ours, plain), (width, dtype, weighted)
    return 1


CHECKS = {
    check.__name__: check
    for check in (metadata_and_slot_values, counts_too_small, sorted_rows, aggregation)
}

if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, CHECKS[check](), "checked")
