"""A quantised matrix in the other memory order, as the weight gradients want it.

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
    current_stream,
    device_name,
    dtype_name,
    is_cuda,
    require_framework_tensor,
    require_same_device,
)
from ..kernels.cuda_wgrad import wgrad_operands_source
from ..routing.backends import arch_of
from .format import BlockScaledTensor, Code, Orientation
from .recipes import iso
from .reference import transpose_storage

Tensor = torch.Tensor

BLOCK = iso(128)
COLUMN_MULTIPLE = 16


def transpose_codes(q: BlockScaledTensor, padded_offsets: Tensor) -> BlockScaledTensor:
    """`q` `[R, C]` in the other memory order, moving bytes; rows from the last of `padded_offsets`
    on are not written on a GPU.

    Args:
        q: E4M3 in 128 x 128 blocks and `Orientation.ROWS`; R a multiple of 128, C of 16.
        padded_offsets: int64 `[E + 1]` of the routing.

    Raises:
        DTypeError, ShapeError, DeviceError: naming the argument, what came and what is needed.
        CompileError: the kernels are not there and cannot be compiled.
    """
    # In 128 x 128 blocks the transposed matrix has the same blocks, so its scales only change
    # places.
    fits = q.code is Code.E4M3 and q.block == BLOCK and q.orientation is Orientation.ROWS
    found = f"q is {q.code.value} in {q.block} blocks by {q.orientation.value}"
    expect(fits, DTypeError, f"{found}; needed: e4m3 in {BLOCK} blocks by rows")
    expect(len(q.shape) == 2, ShapeError, f"q has shape {q.shape}; needed: [R, C]")
    rows, width = q.shape
    for count, what, multiple in ((rows, "rows", BLOCK.rows), (width, "columns", COLUMN_MULTIPLE)):
        words = f"there are {count} {what}; needed: a multiple of {multiple}"
        expect(count % multiple == 0, ShapeError, words)
    _check_offsets(padded_offsets)
    require_same_device([("q", q.codes), ("padded_offsets", padded_offsets)])
    if not is_cuda(q.codes):
        # The host has one implementation of everything here, the exact quantiser; GPU kernels are
        # tested against it bit for bit.
        return transpose_storage(q)
    columns = Orientation.COLUMNS
    out = BlockScaledTensor.empty((width, rows), BLOCK, q.codes.device, orientation=columns)
    kernels = _kernels(device_name(q.codes))
    kernels.transpose_codes(
        q.bytes, q.scale_inv, padded_offsets, out.bytes, out.scale_inv, current_stream(q.codes)
    )
    return out


@functools.lru_cache(maxsize=64)
def _kernels(device: str) -> Any:
    return wgrad_operands_source(arch_of(device)).load()


def _check_offsets(padded_offsets: Any) -> None:
    require_framework_tensor(padded_offsets, "padded_offsets")
    shape = tuple(map(int, padded_offsets.shape))
    fits = padded_offsets.dtype == torch.int64 and len(shape) == 1 and shape[0] > 0
    found = f"padded_offsets is {dtype_name(padded_offsets.dtype)} {shape}"
    expect(fits, DTypeError, f"{found}; needed: int64 [E + 1]")
