"""FP8 operands of the weight gradients, token-major: one launch on a GPU, the exact quantiser on
the host, equal codes and scales.

A weight gradient contracts over tokens, and the tensor cores want the contraction contiguous: codes
are `[C, R]`, in `Orientation.COLUMNS`. Blocks are 128 x 128, so a matrix that is quantised already,
as dz is for dgrad, needs its bytes moved only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import DTypeError, ShapeError, expect
from ..interop import (
    aligned,
    current_stream,
    device_name,
    device_of,
    dtype_name,
    is_cuda,
    plain_ops,
    require_framework_tensor,
    require_same_device,
)
from ..kernels.cuda_wgrad import wgrad_operands_source
from ..routing.backends import arch_of
from .format import BlockScaledTensor, Code, Orientation
from .recipes import iso
from .reference import quantize, transpose_storage

Tensor = torch.Tensor

BLOCK = iso(128)
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMN_MULTIPLE = 16


def gather_transpose_quantize(
    x: Tensor, row_token: Tensor, padded_offsets: Tensor
) -> BlockScaledTensor:
    """Rows of `x` in expert order, in 128 x 128 blocks with fp32 scales, transposed.

    Args:
        x: `[T, C]`, bf16, fp16 or fp32; C a multiple of 16.
        row_token: int32 `[R]`, R a multiple of 128; a row whose token is none of `[0, T)` is zeros,
            as padding rows (-1) are.
        padded_offsets: int64 `[E + 1]` of the routing: multiples of 128. Codes and scales of the
            rows from the last one on are not written on a GPU and nobody may read them.

    Returns:
        A logical `[R, C]`: codes `[C, R]`, scale_inv `[ceil(C / 128), R / 128]`. NaN and infinity
            as `reference.quantize`.

    Raises:
        DTypeError, ShapeError, DeviceError: naming the argument, what came and what is needed.
        CompileError: the kernels are not there and cannot be compiled.
    """
    return _gathered((("x", x),), row_token, padded_offsets)[0]


def gather_transpose_quantize_pair(
    x: Tensor, dout: Tensor, row_token: Tensor, padded_offsets: Tensor
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """`gather_transpose_quantize` of two matrices of one shape and dtype, in one launch."""
    fits = tuple(dout.shape) == tuple(x.shape)
    expect(
        fits, ShapeError, f"dout has shape {tuple(dout.shape)}; needed: that of x, {tuple(x.shape)}"
    )
    expect(
        dout.dtype == x.dtype,
        DTypeError,
        f"dout is {dtype_name(dout.dtype)}; needed: the dtype of x, {dtype_name(x.dtype)}",
    )
    first, second = _gathered((("x", x), ("dout", dout)), row_token, padded_offsets)
    return first, second


def transpose_codes(q: BlockScaledTensor, padded_offsets: Tensor) -> BlockScaledTensor:
    """`q` `[R, C]` in the other memory order, moving bytes; rows from the last of `padded_offsets`
    on are not written on a GPU.

    Args:
        q: E4M3 in 128 x 128 blocks and `Orientation.ROWS`; R a multiple of 128, C of 16.
        padded_offsets: int64 `[E + 1]` of the routing.

    Raises:
        DTypeError, ShapeError, DeviceError, CompileError: as `gather_transpose_quantize`.
    """
    # In 128 x 128 blocks the transposed matrix has the same blocks, so its scales only change
    # places.
    fits = q.code is Code.E4M3 and q.block == BLOCK and q.orientation is Orientation.ROWS
    expect(
        fits,
        DTypeError,
        f"q is {q.code.value} in {q.block} blocks by {q.orientation.value}; needed: e4m3 in {BLOCK} blocks by rows",
    )
    expect(len(q.shape) == 2, ShapeError, f"q has shape {q.shape}; needed: [R, C]")
    rows, width = q.shape
    _check_sizes(rows, width)
    _check_offsets(padded_offsets)
    require_same_device([("q", q.codes), ("padded_offsets", padded_offsets)])
    if not is_cuda(q.codes):
        # The host has one implementation of everything here, the exact quantiser; GPU kernels are
        # tested against it bit for bit.
        return transpose_storage(q)
    out = _empty(rows, width, q.codes.device)
    kernels = _kernels(device_name(q.codes))
    kernels.transpose_codes(
        q.bytes, q.scale_inv, padded_offsets, out.bytes, out.scale_inv, current_stream(q.codes)
    )
    return out


def _gathered(
    matrices: tuple[tuple[str, Tensor], ...], row_token: Tensor, padded_offsets: Tensor
) -> list[BlockScaledTensor]:
    for name, matrix in matrices:
        _check_values(matrix, name)
    require_framework_tensor(row_token, "row_token")
    fits = row_token.dtype == torch.int32 and len(row_token.shape) == 1
    found = f"row_token is {dtype_name(row_token.dtype)} {tuple(row_token.shape)}"
    expect(fits, DTypeError, f"{found}; needed: int32 [R]")
    rows, width = int(row_token.shape[0]), int(matrices[0][1].shape[1])
    _check_sizes(rows, width)
    _check_offsets(padded_offsets)
    require_same_device([*matrices, ("row_token", row_token), ("padded_offsets", padded_offsets)])
    # The kernel reads 16 bytes at a time. A view may start in between, and is copied then.
    values = [aligned(matrix) for _, matrix in matrices]
    if not is_cuda(row_token):
        with plain_ops():
            return [
                transpose_storage(quantize(_gather_rows(value, row_token), BLOCK))
                for value in values
            ]
    outs = [_empty(rows, width, device_of(row_token)) for _ in values]
    kernels = _kernels(device_name(row_token))
    launch = (
        kernels.gather_transpose_quantize
        if len(values) == 1
        else kernels.gather_transpose_quantize_pair
    )
    # The native function takes a flat list: codes and scales of each output in turn.
    flat = [tensor for out in outs for tensor in (out.bytes, out.scale_inv)]
    launch(
        *values,
        row_token.contiguous(),
        padded_offsets.contiguous(),
        *flat,
        current_stream(row_token),
    )
    return outs


def _gather_rows(values: Tensor, row_token: Tensor) -> Tensor:
    """fp32 `[R, C]`; rows without a token are zeros whatever the tokens hold."""
    out = torch.zeros(
        (int(row_token.shape[0]), int(values.shape[1])), dtype=torch.float32, device=values.device
    )
    # Rows without a token stay zero and are not computed as token times zero, because NaN times
    # zero is NaN.
    rows = torch.nonzero((row_token >= 0) & (row_token < int(values.shape[0]))).reshape([-1])
    if int(rows.shape[0]):
        tokens = row_token.to(torch.int64).index_select(0, rows)
        out[rows] = values.to(torch.float32).index_select(0, tokens)
    return out


def _empty(rows: int, width: int, device: Any) -> BlockScaledTensor:
    """Unwritten, token-major."""
    return BlockScaledTensor.empty((width, rows), BLOCK, device, orientation=Orientation.COLUMNS)


@functools.lru_cache(maxsize=64)
def _kernels(device: str) -> Any:
    return wgrad_operands_source(arch_of(device)).load()


def _check_values(values: Any, name: str) -> None:
    require_framework_tensor(values, name)
    expect(
        values.dtype in VALUE_DTYPES,
        DTypeError,
        f"{name} is {dtype_name(values.dtype)}; needed: bfloat16, float16 or float32",
    )
    expect(
        len(values.shape) == 2,
        ShapeError,
        f"{name} has shape {tuple(values.shape)}; needed: [T, C]",
    )


def _check_sizes(rows: int, width: int) -> None:
    expect(
        rows % BLOCK.rows == 0,
        ShapeError,
        f"there are {rows} rows; needed: a multiple of {BLOCK.rows}",
    )
    expect(
        width % COLUMN_MULTIPLE == 0,
        ShapeError,
        f"there are {width} columns; needed: a multiple of {COLUMN_MULTIPLE}",
    )


def _check_offsets(padded_offsets: Any) -> None:
    require_framework_tensor(padded_offsets, "padded_offsets")
    fits = (
        padded_offsets.dtype == torch.int64
        and len(padded_offsets.shape) == 1
        and int(padded_offsets.shape[0]) > 0
    )
    found = f"padded_offsets is {dtype_name(padded_offsets.dtype)} {tuple(padded_offsets.shape)}"
    expect(fits, DTypeError, f"{found}; needed: int64 [E + 1]")
