"""Values of rows brought back to slots and tokens: by plain tensor operations on a host, and by
kernels that wait for nothing on a GPU.
"""

from __future__ import annotations

import torch

from ..errors import DTypeError, expect
from ..interop import (
    device_of,
    dtype_name,
    empty,
    require_framework_tensor,
    require_same_device,
    requires_grad,
    same_device,
)
from ..refusals import need_dtype, need_shape
from .backends import kernels_for
from .metadata import RoutingMetadata

Tensor = torch.Tensor
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scatter_to_slots(row_values: Tensor, routing: RoutingMetadata) -> Tensor:
    """fp32 `[R]` -> `[T, K]`: the value of each slot's row, exactly 0 in invalid slots; padding
    rows are not read (dprobs).
    """
    require_framework_tensor(row_values, "row_values")
    need_dtype("row_values", row_values, torch.float32)
    needed = (routing.num_rows,)
    need_shape(tuple(row_values.shape) == needed, "row_values", row_values, needed)
    require_same_device([("row_values", row_values), ("routing", routing.slot_row)])
    out = empty((routing.num_tokens, routing.topk), torch.float32, device_of(row_values))
    kernels = kernels_for(row_values)
    kernels.gather_or_zero(routing.slot_row, row_values.detach().contiguous(), out)
    return out


def aggregate(
    rows: Tensor,
    routing: RoutingMetadata,
    weighted: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`[R, H]` -> `[T, H]`: per token the sum of its rows, in slot order and fp32; a token without
    rows gets exact zeros.

    Args:
        rows: bf16, fp16 or fp32; padding rows are not read.
        routing: whose `slot_row` and `row_prob` to use.
        weighted: times the routing probability (out), or not (dx).
        dtype: of the result: that of `rows` (default), or any with fp32 rows, or fp32.

    Raises:
        DTypeError, ShapeError, DeviceError: `rows` does not fit; the message says what is needed.
    """
    require_framework_tensor(rows, "rows")
    dtype = dtype or rows.dtype
    # Both passes ask, so messages are composed for errors only.
    if rows.dtype not in VALUE_DTYPES or dtype != rows.dtype:
        _check_dtypes(rows.dtype, dtype)
    if len(rows.shape) != 2 or int(rows.shape[0]) != routing.num_rows:
        need_shape(False, "rows", rows, f"[{routing.num_rows}, H]")
    if not same_device(rows, routing.held[0]):
        require_same_device([("rows", rows), ("routing", routing.held[0])])
    if requires_grad(rows) or not rows.is_contiguous():
        rows = rows.detach().contiguous()
    # Unwritten: the kernel writes every token, and zeros for those without rows.
    out = empty((routing.num_tokens, int(rows.shape[1])), dtype, device_of(rows))
    kernels_for(rows).aggregate_rows(rows, routing.slot_row, routing.row_prob, out, weighted)
    return out


def _check_dtypes(rows: torch.dtype, out: torch.dtype) -> None:
    for name, value in (("rows", rows), ("dtype", out)):
        words = f"{name} is {dtype_name(value)}; needed: bfloat16, float16 or float32"
        expect(value in VALUE_DTYPES, DTypeError, words)
    expect(
        out == rows or torch.float32 in (out, rows),
        DTypeError,
        f"dtype is {dtype_name(out)} for rows of {dtype_name(rows)}; needed: the same, or one of them float32",
    )
