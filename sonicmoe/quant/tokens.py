"""Tokens that arrive in FP8: e4m3 codes with fp32 multipliers, quantised where they were sent.

1x128   multipliers `[T, ceil(H/128)]`: one per row and 128 columns
row     multipliers `[T, 1]`: one per row. Weight gradients then need no second rounding of x
        (docs/parallel.md, "Tokens that arrive in FP8").
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
from .recipes import BlockShape, rows
from .reference import dequantize, quantize

Tensor = torch.Tensor

WORD_COLUMNS = 128
WORD_BLOCK = rows(WORD_COLUMNS)


def is_fp8(x: Tensor) -> bool:
    """Whether `x` has one of the 8-bit floating dtypes."""
    return "float8" in dtype_name(x.dtype)


def words_per_row(hidden: int) -> int:
    """Multipliers of a row of `hidden` columns in the 1x128 form."""
    return -(-hidden // WORD_COLUMNS)


def token_block(hidden: int, multipliers: int) -> BlockShape:
    """The block that `multipliers` per row of `hidden` columns belong to. Where both forms have
    one, for H up to 128, it is the 1x128 form.
    """
    return WORD_BLOCK if multipliers == words_per_row(hidden) else rows(hidden)


def has_row_scales(x: object) -> bool:
    """Whether these are quantised tokens with one multiplier per row of more than 128 columns."""
    return isinstance(x, BlockScaledTensor) and x.block.cols > WORD_COLUMNS


def tokens_of(codes: Tensor, scale_inv: Tensor) -> BlockScaledTensor:
    """e4m3 `[T, H]` and fp32 `[T, ceil(H/128)]` or `[T, 1]` as one type; shares both tensors."""
    block = token_block(int(codes.shape[1]), int(scale_inv.shape[1]))
    return BlockScaledTensor(codes, scale_inv, block, Code.E4M3)


def checked_tokens(codes: Tensor, scale_inv: Tensor) -> BlockScaledTensor:
    """`tokens_of` for tensors that `check_fp8_tokens` has seen, whose checks a forward need not
    repeat.
    """
    block = token_block(int(codes.shape[1]), int(scale_inv.shape[1]))
    return BlockScaledTensor.of_checked(codes, scale_inv, block, Code.E4M3)


def quantize_tokens(x: Tensor, *, row_scale: bool = False) -> BlockScaledTensor:
    """Tokens bf16, fp16 or fp32 `[T, H]` as their sender quantises them: with one scale per row and
    128 columns, which are the codes that the engines make themselves, or with one per row.

    On a GPU, one scale per 128 columns is one launch, and one per row several; neither waits.
    """
    with plain_ops():
        hidden = int(x.shape[1])
        if row_scale or hidden % 16:  # the kernel reads 16 columns at a time
            return quantize(x, rows(hidden if row_scale else WORD_COLUMNS))
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
    if shape not in (per_word, (tokens, 1)):
        needs = f"[T, ceil(H/128)] = {per_word}, or [T, 1] with one multiplier per row"
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
        and multipliers in (words_per_row(int(hidden)), 1)
        and x.is_contiguous()
        and x_scale.is_contiguous()
        and same_device(x, x_scale)
    )
