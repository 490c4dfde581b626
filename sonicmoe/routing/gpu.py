"""Routing metadata, slot values and token aggregation on the GPU: no host sync, no allocation of
unknown size.

Every function also takes host tensors, which plain tensor operations then serve with the same
results.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DTypeError, ShapeError, expect
from ..interop import (
    device_of,
    dtype_name,
    empty,
    plain_ops,
    require_framework_tensor,
    require_same_device,
)
from .backends import MAX_EXPERTS, RoutingKernels, kernels_for, plain_kernels
from .metadata import ROW_ALIGNMENT, RoutingMetadata, check_alignment, round_up
from .validation import check_contents, check_counts, check_indices_and_probs, host_counts_of

Tensor = torch.Tensor
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def build_routing_gpu(
    indices: Tensor,
    probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool = False,
    kernels: RoutingKernels | None = None,
) -> RoutingMetadata:
    """Build the metadata of one forward on the device of `indices`, in one launch and without
    waiting for it.

    The tensors equal `build_routing`'s bit for bit, but for the number of rows where the counts are
    not known on the
    host: then R is the worst case of `num_rows_bound`, and rows behind `padded_offsets[E]` are
    padding (-1, -1, 0).

    Args:
        indices: int32 or int64 `[T, K]`; an entry is valid iff `0 <= id < num_experts`, in any
            position.
        probs: fp32 `[T, K]`; read at valid slots only.
        num_experts: E.
        tokens_per_expert: E counts on the host, true or rounded up to a common power-of-two
            alignment; else None, an empty list or a device tensor, which is not read. Counts below
            the true ones lose slots (never memory safety) unless `validate`.
        alignment: rows every expert is padded to.
        validate: check every precondition, the counts too; waits for the device.
        kernels: the implementation to use instead of the automatic choice.

    Raises:
        RoutingError: `validate` found a violation, or the counts are no counts.
        ShapeError, DTypeError, DeviceError: the inputs do not fit together.
        CompileForbiddenError: the kernels are not compiled and compiling is forbidden.
    """
    check_alignment(alignment)
    check_indices_and_probs(indices, probs, num_experts)
    given = host_counts_of(tokens_per_expert, num_experts)
    indices, probs = indices.detach().contiguous(), probs.detach().contiguous()
    if validate:
        with plain_ops():
            check_contents(indices, probs, num_experts)
    tokens, topk = (int(size) for size in indices.shape)
    rows = num_rows_bound(tokens * topk, num_experts, alignment, given)
    outputs = _allocate(tokens, topk, num_experts, rows, device_of(indices))
    if kernels is None and num_experts > MAX_EXPERTS:
        kernels = plain_kernels(
            f"{num_experts} experts; the GPU kernels take at most {MAX_EXPERTS}"
        )
    chosen = kernels or kernels_for(indices)
    chosen.build_metadata(indices, probs, outputs, num_experts, alignment)
    # what the caller gave may be rounded up, or wrong: it sizes the rows, and is not passed on as
    # known
    host_counts = None
    if validate:
        host_counts = tuple(int(count) for count in outputs[0].tolist())
        if given is not None:
            check_counts(given, host_counts)
    named = dict(zip(RoutingMetadata.TENSOR_FIELDS, outputs, strict=True))
    return RoutingMetadata(
        tokens, topk, num_experts, alignment, rows, host_counts=host_counts, **named
    )


def num_rows_bound(
    num_slots: int, num_experts: int, alignment: int, given: tuple[int, ...] | None = None
) -> int:
    """Rows that any routing of `num_slots` slots fits in; with counts given, the rows of those
    counts.
    """
    if given is not None:
        return sum(round_up(count, alignment) for count in given)
    # Each expert that has rows wastes at most alignment - 1, and the sum is a multiple of the
    # alignment.
    return (num_slots + min(num_experts, num_slots) * (alignment - 1)) // alignment * alignment


def _allocate(tokens: int, topk: int, experts: int, rows: int, device: Any) -> tuple[Tensor, ...]:
    """Unwritten outputs in `RoutingMetadata.TENSOR_FIELDS` order."""
    return (
        empty((experts,), torch.int32, device),
        empty((experts + 1,), torch.int64, device),
        empty((experts,), torch.int32, device),
        empty((experts + 1,), torch.int64, device),
        empty((rows,), torch.int32, device),
        empty((rows,), torch.int64, device),
        empty((tokens, topk), torch.int64, device),
        empty((rows,), torch.float32, device),
    )


def gather_to_rows(
    slot_values: Tensor, routing: RoutingMetadata, *, kernels: RoutingKernels | None = None
) -> Tensor:
    """fp32 `[T, K]` -> `[R]`: the value of each row's slot, exactly 0 in padding rows. Its
    transpose is `scatter_to_slots`.
    """
    _check_fp32(slot_values, "slot_values", (routing.num_tokens, routing.topk), routing)
    values = slot_values.detach().contiguous().reshape([routing.num_tokens * routing.topk])
    out = empty((routing.num_rows,), torch.float32, device_of(values))
    (kernels or kernels_for(values)).gather_or_zero(routing.row_slot, values, out)
    return out


def scatter_to_slots(
    row_values: Tensor, routing: RoutingMetadata, *, kernels: RoutingKernels | None = None
) -> Tensor:
    """fp32 `[R]` -> `[T, K]`: the value of each slot's row, exactly 0 in invalid slots; padding
    rows are not read (dprobs).
    """
    _check_fp32(row_values, "row_values", (routing.num_rows,), routing)
    out = empty((routing.num_tokens, routing.topk), torch.float32, device_of(row_values))
    (kernels or kernels_for(row_values)).gather_or_zero(
        routing.slot_row, row_values.detach().contiguous(), out
    )
    return out


def aggregate(
    rows: Tensor,
    routing: RoutingMetadata,
    *,
    weighted: bool,
    dtype: torch.dtype | None = None,
    kernels: RoutingKernels | None = None,
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
    for name, value in (("rows", rows.dtype), ("dtype", dtype)):
        expect(
            value in VALUE_DTYPES,
            DTypeError,
            f"{name} is {dtype_name(value)}; needed: bfloat16, float16 or float32",
        )
    expect(
        dtype == rows.dtype or torch.float32 in (dtype, rows.dtype),
        DTypeError,
        f"dtype is {dtype_name(dtype)} for rows of {dtype_name(rows.dtype)}; needed: the same, or one of them float32",
    )
    fits = len(rows.shape) == 2 and int(rows.shape[0]) == routing.num_rows
    expect(fits, ShapeError, f"rows has shape {tuple(rows.shape)}; needed: [{routing.num_rows}, H]")
    require_same_device([("rows", rows), ("routing", routing.slot_row)])
    out = empty((routing.num_tokens, int(rows.shape[1])), dtype, device_of(rows))
    chosen = kernels or kernels_for(rows)
    chosen.aggregate_rows(
        rows.detach().contiguous(), routing.slot_row, routing.row_prob, out, weighted
    )
    return out


def _check_fp32(values: Any, name: str, shape: tuple[int, ...], routing: RoutingMetadata) -> None:
    require_framework_tensor(values, name)
    expect(
        values.dtype == torch.float32,
        DTypeError,
        f"{name} is {dtype_name(values.dtype)}; needed: float32",
    )
    expect(
        tuple(values.shape) == shape,
        ShapeError,
        f"{name} has shape {tuple(values.shape)}; needed: {shape}",
    )
    require_same_device([(name, values), ("routing", routing.slot_row)])
