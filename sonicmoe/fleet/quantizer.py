"""The quantiser that PaddleFleet calls before it dispatches, under the name and with the parameters
that it looks for in the signature.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError, expect
from ..interop import dtype_name, plain_ops, require_framework_tensor
from ..quant.gpu import VALUE_DTYPES
from ..quant.recipes import ScaleFormat, rows
from ..quant.reference import quantize
from ..quant.tokens import WORD_COLUMNS, quantize_tokens
from ..refusals import need_dtype, need_shape
from .carrier import (
    GROUP_COLUMNS,
    Carrier,
    declare_carrier,
    declared_carrier,
    pack_words,
    require_words,
    words_of_bytes,
)

Tensor = torch.Tensor


def quantize_activation_blockscaled_fast(
    x: Tensor, scale_dtype: Any = None, pack_scale_words: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens to send, as e4m3 codes and scales.

    | `pack_scale_words` | `scale_dtype` | scales | quantised |
    |---|---|---|---|
    | True | None | int32 `[T, H/128]`, packed words of the declared carrier | as the carrier says |
    | False | float32 | fp32 `[T, ceil(H/128)]` | per 128 columns |
    | False | int32 | int32 `[T, ceil(H/32)]`, one E8M0 byte per word | per 32 columns, powers of two |
    | False | None | uint8 `[T, ceil(H/32)]`, E8M0 bytes | per 32 columns, powers of two |

    Packing declares the carrier of this process, if nobody did: fp32 multipliers per 128 columns.
    E8M0 bytes of H a multiple of 128 declare E8M0, because their reader cannot tell them from the
    bytes of packed words.

    Args:
        x: contiguous bf16 `[T, H]` (fp16 and fp32 too); H a multiple of 128 to pack.

    Raises:
        ConfigError: a combination that is not in the table, or not that of the declared carrier.
        DTypeError, ShapeError, FrameworkError: naming the argument, what came and what is needed.
    """
    require_framework_tensor(x, "x")
    need_dtype("x", x, *VALUE_DTYPES)
    need_shape(len(x.shape) == 2, "x", x, "[T, H]")
    name = None if scale_dtype is None else dtype_name(scale_dtype)
    if pack_scale_words:
        return _packed(x, name)
    if name == "float32":
        tokens = quantize_tokens(x)
        return tokens.codes, tokens.scale_inv
    words = f"scale_dtype is {name!r}; needed: None, float32, int32 or uint8"
    expect(name in (None, "int32", "uint8"), ConfigError, words)
    if name != "int32" and int(x.shape[1]) % WORD_COLUMNS == 0:
        # Four such bytes have the dtype and shape of a word, and are read as the carrier says.
        declare_carrier(Carrier.E8M0_1X32)
    codes, exponents = _microscaled(x)
    return codes, exponents if name == "int32" else exponents.to(torch.uint8)


def _packed(x: Tensor, scale_dtype: str | None) -> tuple[Tensor, Tensor]:
    words = f"scale_dtype is {scale_dtype!r} with pack_scale_words; packed words are int32"
    expect(scale_dtype in (None, "int32"), ConfigError, f"{words}: needed: None")
    require_words(x)
    carrier = declared_carrier() or declare_carrier(Carrier.FP32_1X128)
    if carrier is not Carrier.E8M0_1X32:
        tokens = quantize_tokens(x)
        return tokens.codes, pack_words(tokens)
    codes, exponents = _microscaled(x)
    return codes, words_of_bytes(exponents.to(torch.uint8))


def _microscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and biased exponents, int32 `[T, ceil(H/32)]`: the scale is the least power of two that
    keeps the group within +-448. An infinity makes its group's exponent 255, which is NaN.
    """
    with plain_ops():
        q = quantize(x, rows(GROUP_COLUMNS), scale_format=ScaleFormat.POW2)
        shape = tuple(q.scale_inv.shape)
        if 0 in shape:  # which Paddle cannot view
            return q.codes, torch.zeros(shape, dtype=torch.int32, device=x.device)
        # The exponent of an fp32 lies above its 23 bits of mantissa. No scale has a sign.
        return q.codes, q.scale_inv.view(torch.int32) >> 23
