"""Triton counterpart of `cuda/aggregate.cu`: fp32 sums in slot order, product and sum rounded
separately.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..jit.triton_kernel import stored_jit

Tensor = torch.Tensor

_MAX_COLUMNS = 1024


@stored_jit(do_not_specialize=["num_rows"])
def _aggregate(
    rows,
    slot_row,
    row_prob,
    out,
    num_rows,
    width,
    topk,
    column_blocks,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # 64 bits, because token times width can pass 2^31.
    program = tl.program_id(0).to(tl.int64)
    token = program // column_blocks
    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    # One program adds all slots of a token in slot order, so the sum has the same bits in every
    # run. No other program writes this part of `out`, so no atomics are needed.
    for k in range(0, topk):
        row = tl.load(slot_row + token * topk + k)
        # A slot that was dropped or belongs to another rank has row -1 and adds nothing; its rows
        # are not read.
        if (row >= 0) & (row < num_rows):
            term = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                term = term * tl.load(row_prob + row)
            total = total + term
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def aggregate_rows(
    rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
) -> None:
    """`out[t] = sum_k w * rows[slot_row[t, k]]`: rows `[R, H]`, slot_row int64 `[T, K]`, row_prob
    fp32 `[R]`, out `[T, H]`.
    """
    tokens, topk = (int(size) for size in slot_row.shape)
    width = int(rows.shape[1])
    if tokens == 0 or width == 0:
        return
    # Triton needs a power of two as the length of a block; the mask `inside` cuts off the surplus.
    columns = min(_MAX_COLUMNS, max(triton.next_power_of_2(width), 16))
    blocks = triton.cdiv(width, columns)
    # A contracted multiply-add would round once where plain tensor operations round twice.
    _aggregate[(tokens * blocks,)](
        rows, slot_row, row_prob, out, int(rows.shape[0]), width, topk, blocks,
        WEIGHTED=weighted, COLUMNS=columns, enable_fp_fusion=False,
    )  # fmt: skip
