"""Scales of e4m3 tokens `[T, H]` in the form in which PaddleFleet carries them between ranks.

    fp32     [T, ceil(H/128)]             multipliers: what the node takes as `x_scale`
    int32    [T, H/128]                   packed words, H a multiple of 128: either one fp32 multiplier
                                          per word, or four E8M0 bytes, the first group in the lowest
    uint8    [T, H/32]                    the bytes of packed words, H a multiple of 128
    int32    [T, ceil(H/32)]              one E8M0 byte per word, as a number
    uint8    [T, ceil(H/32)]              E8M0 bytes, H no multiple of 128

Both meanings of a packed word have one dtype and one shape, and no value tells them apart for
certain. So a process declares which one its words have, once; the quantiser does it. Words without
a declaration are refused.

An E8M0 byte b stands for 2^(b - 127), and 255 for NaN. It scales 32 columns, and the engines read
one multiplier per 128. The four groups are brought to the largest of their scales: that only lowers
exponents, so it is exact but for codes that fall below E4M3's normal range and lose bits there.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import NamedTuple

import torch

from ..enums import member_of
from ..errors import ConfigError, DTypeError, ShapeError, expect
from ..interop import dtype_name, plain_ops, require_framework_tensor, require_same_device
from ..quant.format import BlockScaledTensor
from ..quant.reference import encode_e4m3
from ..quant.tokens import (
    WORD_COLUMNS,
    check_fp8_tokens,
    checked_tokens,
    tokens_of,
    words_per_row,
)
from ..refusals import need_dtype, need_shape

Tensor = torch.Tensor

GROUP_COLUMNS = 32
GROUPS_PER_WORD = WORD_COLUMNS // GROUP_COLUMNS
_E8M0_NAN = 255


class Carrier(Enum):
    """The meaning of a packed int32 word: the fp32 multiplier of its 128 columns, or four E8M0
    bytes.
    """

    FP32_1X128 = "fp32_1x128"
    E8M0_1X32 = "e8m0_1x32"


# Threads that quantise their first tokens together declare together.
_LOCK = threading.Lock()
_declared: Carrier | None = None


def declare_carrier(carrier: Carrier | str) -> Carrier:
    """Say once per process what packed words mean, on every rank alike. Saying it again is fine.

    Raises:
        ConfigError: an unknown name, or another meaning was declared before.
    """
    global _declared
    wanted = member_of(Carrier, carrier, "carrier")
    with _LOCK:
        before = _declared
        expect(
            before in (None, wanted),
            ConfigError,
            f"carrier is {wanted.value!r}, and this process declared {before and before.value!r} "
            "before; words that are under way would change their meaning: needed: one carrier per "
            "process",
        )
        _declared = wanted
    return wanted


def declared_carrier() -> Carrier | None:
    """What packed words mean in this process; None where nobody has said it."""
    return _declared


class Arrived(NamedTuple):
    """Tokens as the node takes them (`tokens.codes` and `tokens.scale_inv`), and whether the codes
    are others than those that came, because their groups had scales of their own.
    """

    tokens: BlockScaledTensor
    moved: bool


def require_words(x: Tensor) -> None:
    """Raise ShapeError for tokens `[T, H]` whose scales do not fill whole words."""
    needed = f"[T, H] with H a multiple of {WORD_COLUMNS}, whose scales fill whole words"
    need_shape(int(x.shape[1]) % WORD_COLUMNS == 0, "x", x, needed)


def pack_words(tokens: BlockScaledTensor) -> Tensor:
    """int32 `[T, H/128]`: the fp32 multipliers as words."""
    return tokens.scale_inv.view(torch.int32)


def tokens_from_carrier(codes: Tensor, scale: Tensor) -> Arrived:
    """Codes e4m3 `[T, H]` and scales in any form of the table above, as tokens of the node.

    Raises:
        ConfigError: packed words, and `declare_carrier` was not called.
        DTypeError, ShapeError, DeviceError, FrameworkError: naming the argument, what came and what
            is needed.
    """
    for name, value in (("codes", codes), ("scale", scale)):
        require_framework_tensor(value, name)
    if codes.dtype != torch.float8_e4m3fn or len(codes.shape) != 2:
        raise DTypeError(
            f"codes are {dtype_name(codes.dtype)} {tuple(codes.shape)}; needed: float8_e4m3fn [T, H]"
        )
    require_same_device([("codes", codes), ("scale", scale)])
    if scale.dtype == torch.float32:
        check_fp8_tokens(codes, scale)
        return Arrived(checked_tokens(codes.detach(), scale.detach()), moved=False)
    with plain_ops():
        codes, scale = codes.detach().contiguous(), scale.detach().contiguous()
        words = _packed_words(codes, scale)
        if words is None:
            return _rescaled(codes, _one_byte_per_word(codes, scale))
        if _meaning(words) is Carrier.E8M0_1X32:
            return _rescaled(codes, _bytes_of(words))
        return Arrived(checked_tokens(codes, words.view(torch.float32)), moved=False)


def _packed_words(codes: Tensor, scale: Tensor) -> Tensor | None:
    """int32 `[T, H/128]` if the scales are packed words or their bytes."""
    tokens, hidden = (int(size) for size in codes.shape)
    if hidden % WORD_COLUMNS:
        return None
    words, shape = hidden // WORD_COLUMNS, tuple(int(size) for size in scale.shape)
    if scale.dtype == torch.int32 and shape == (tokens, words):
        return scale
    if scale.dtype == torch.uint8 and shape == (tokens, GROUPS_PER_WORD * words):
        return words_of_bytes(scale)
    return None


def words_of_bytes(held: Tensor) -> Tensor:
    """uint8 `[T, 4 W]` -> int32 `[T, W]`, the same memory; the first byte of four is the lowest."""
    tokens, count = (int(size) for size in held.shape)
    # Paddle cannot view a tensor without elements.
    if tokens == 0:
        return torch.zeros((0, count // 4), dtype=torch.int32, device=held.device)
    return held.view(torch.int32)


def _meaning(words: Tensor) -> Carrier:
    if _declared is None:
        raise ConfigError(
            f"scale has packed words {tuple(words.shape)}, and nobody declared whether they are "
            "fp32 multipliers or four E8M0 bytes; needed: "
            "sonicmoe.fleet.carrier.declare_carrier(...) on every rank, before the first dispatch"
        )
    return _declared


def _one_byte_per_word(codes: Tensor, scale: Tensor) -> Tensor:
    """int32 `[T, ceil(H/32)]` in 0..255."""
    tokens, hidden = (int(size) for size in codes.shape)
    groups = -(-hidden // GROUP_COLUMNS)
    shape = tuple(int(size) for size in scale.shape)
    need_dtype("scale", scale, torch.float32, torch.int32, torch.uint8)
    words = f"scale is {dtype_name(scale.dtype)} {shape}; codes {(tokens, hidden)} need"
    packed = f" or packed int32 {(tokens, words_per_row(hidden))}"
    needed = f"{(tokens, groups)}{packed if hidden % WORD_COLUMNS == 0 else ''}"
    expect(shape == (tokens, groups), ShapeError, f"{words} {needed}")
    # Rows that no dispatcher wrote may hold any number.
    return scale.to(torch.int32).clamp(0, _E8M0_NAN)


def _bytes_of(words: Tensor) -> Tensor:
    """int32 `[T, H/128]` -> int32 `[T, H/32]` in 0..255, the lowest byte of each word first."""
    return words if 0 in tuple(words.shape) else words.view(torch.uint8).to(torch.int32)


def _rescaled(codes: Tensor, exponents: Tensor) -> Arrived:
    """One multiplier per 128 columns from biased exponents int32 `[T, ceil(H/32)]`."""
    tokens, hidden = (int(size) for size in codes.shape)
    words = words_per_row(hidden)
    # Paddle reduces and reshapes no tensor without elements.
    if tokens == 0:
        scale = torch.zeros((0, words), dtype=torch.float32, device=codes.device)
        return Arrived(tokens_of(codes, scale), moved=False)
    missing = GROUPS_PER_WORD * words - int(exponents.shape[1])
    if missing:
        # Groups beyond the last column get the least exponent, which decides no largest one.
        least = torch.zeros([tokens, missing], dtype=torch.int32, device=codes.device)
        exponents = torch.cat([exponents, least], 1)
    grouped = exponents.reshape([tokens, words, GROUPS_PER_WORD])
    # 2^-126 is the least multiplier that fp32 holds as a normal number.
    largest = torch.maximum(grouped.amax(-1), torch.ones_like(grouped[..., 0]))
    # At most 1: no code grows. Below 2^-126 no code is left of any other than zero.
    factor = _power_of_two(127 + (grouped - largest.unsqueeze(-1)).clamp(-126, 0))
    columns = factor.reshape([tokens, -1, 1]).expand(-1, -1, GROUP_COLUMNS)
    values = codes.to(torch.float32) * columns.reshape([tokens, -1])[:, :hidden]
    return Arrived(tokens_of(encode_e4m3(values), _multipliers(largest)), moved=True)


def _multipliers(exponents: Tensor) -> Tensor:
    """fp32 of biased exponents 1..255, where 255 is NaN: the bits of 255 would be an infinity."""
    scale = _power_of_two(exponents.clamp(1, _E8M0_NAN - 1))
    return torch.where(exponents == _E8M0_NAN, torch.full_like(scale, float("nan")), scale)


def _power_of_two(biased: Tensor) -> Tensor:
    """fp32 `2^(biased - 127)` of int32 1..254, by its bits."""
    return (biased << 23).view(torch.float32)
