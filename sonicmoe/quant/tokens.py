"""Tokens that arrive in FP8, quantised where they were sent: e4m3 codes `[T, H]` with fp32
multipliers `[T, ceil(H/128)]`, one per row and 128 columns (docs/parallel.md, "Tokens that arrive
in FP8").
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DTypeError, ShapeError, expect
from ..interop import (
    dtype_name,
    plain_ops,
    require_framework_tensor,
    require_same_device,
    same_device,
)
from ..refusals import need_shape
from .format import BlockScaledTensor, Code
from .gpu import quantize_rows
from .recipes import rows
from .reference import dequantize, quantize

Tensor = torch.Tensor

WORD_COLUMNS = 128
WORD_BLOCK = rows(WORD_COLUMNS)


def is_fp8(x: Tensor) -> bool:
    """Whether `x` has one of the 8-bit floating dtypes."""
    return "float8" in dtype_name(x.dtype)


def words_per_row(hidden: int) -> int:
    """Multipliers of a row of `hidden` columns."""
    return -(-hidden // WORD_COLUMNS)


def tokens_of(codes: Tensor, scale_inv: Tensor) -> BlockScaledTensor:
    """e4m3 `[T, H]` and fp32 `[T, ceil(H/128)]` as one type; shares both tensors."""
    return BlockScaledTensor(codes, scale_inv, WORD_BLOCK, Code.E4M3)


def checked_tokens(codes: Tensor, scale_inv: Tensor) -> BlockScaledTensor:
    """`tokens_of` for tensors that `check_fp8_tokens` has seen, whose checks a forward need not
    repeat.
    """
    return BlockScaledTensor.of_checked(codes, scale_inv, WORD_BLOCK, Code.E4M3)


def quantize_tokens(x: Tensor) -> BlockScaledTensor:
    """Tokens bf16, fp16 or fp32 `[T, H]` as their sender quantises them, which are the codes that the
    engines make themselves. On a GPU one launch, which does not wait.
    """
    with plain_ops():
        if int(x.shape[1]) % 16:  # the kernel reads 16 columns at a time
            return quantize(x, WORD_BLOCK)
        return quantize_rows(x)


def anchor_of(tokens: Tensor | BlockScaledTensor | None) -> Tensor:
    """A tensor of these tokens, for questions about device and stream."""
    assert tokens is not None
    return tokens.codes if isinstance(tokens, BlockScaledTensor) else tokens


def to_bfloat16(x: BlockScaledTensor) -> Tensor:
    """The values of quantised tokens, rounded to bf16; a new tensor."""
    with plain_ops():
        return dequantize(x, torch.bfloat16)


def check_fp8_tokens(x: Tensor, x_scale: Tensor, name: str = "x") -> None:
    """Check codes and multipliers at a border, without reading device memory. name: what messages
    call the tokens.
    """
    # One expression without messages for the usual case, which every forward asks about; what
    # follows only finds out which part of it is false.
    if _are_fp8_tokens(x, x_scale):
        return
    scale = f"{name}_scale"
    require_framework_tensor(x_scale, scale)
    found = dtype_name(x.dtype)
    if x.dtype != torch.float8_e4m3fn:
        needed = f"{name} in float8_e4m3fn, or no {scale}"
        raise DTypeError(f"{name} is {found} and {scale} was given; needed: {needed}")
    if x_scale.dtype != torch.float32:
        # DeepEP carries multipliers as words; whoever forgets to decode them is told so.
        needed = "float32 multipliers (words of a carrier become such by sonicmoe.fleet.carrier)"
        raise DTypeError(f"{scale} is {dtype_name(x_scale.dtype)}; needed: {needed}")
    need_shape(len(x.shape) == 2, name, x, "[T, H]")
    tokens, hidden = (int(size) for size in x.shape)
    shape = tuple(int(size) for size in x_scale.shape)
    per_word = (tokens, words_per_row(hidden))
    if shape != per_word:
        needs = f"[T, ceil(H/128)] = {per_word}"
        raise ShapeError(f"{scale} has shape {shape}; {name} {(tokens, hidden)} needs {needs}")
    for argument, value in ((name, x), (scale, x_scale)):
        # A dispatcher that hands multipliers on column by column is told so here. A silent copy
        # would cost what the dispatch in FP8 has saved.
        words = f"{argument} has strides {tuple(value.stride())}"
        needed = "contiguous rows, as DeepEP delivers them"
        expect(bool(value.is_contiguous()), ShapeError, f"{words}; needed: {needed}")
    require_same_device([(name, x), (scale, x_scale)])


def _are_fp8_tokens(x: Tensor, x_scale: Any) -> bool:
    if not (
        isinstance(x_scale, torch.Tensor)
        and x.dtype == torch.float8_e4m3fn
        and x_scale.dtype == torch.float32
        and len(x.shape) == len(x_scale.shape) == 2
    ):
        return False
    tokens, hidden = x.shape
    count, multipliers = x_scale.shape
    return bool(
        count == tokens
        and multipliers == words_per_row(int(hidden))
        and x.is_contiguous()
        and x_scale.is_contiguous()
        and same_device(x, x_scale)
    )
