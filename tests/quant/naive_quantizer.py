"""The quantiser written a second time, from the formats' definitions: numpy and Python numbers
only, block by block.

Shares nothing with the package. E4M3 codes come from a table of the 127 non-negative finite values
and its midpoints in fp64.
"""

from __future__ import annotations

import math

import numpy as np

E4M3_NAN = 0x7F
LARGEST = {"e4m3": 448.0, "int8": 127.0}
AMAX_FLOOR = np.float32(2.0**-100)


def decode_e4m3(code: int) -> float:
    """The value of one byte: sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is
    subnormal, 0x7F and 0xFF are NaN.
    """
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = np.array([decode_e4m3(code) for code in range(E4M3_NAN)])
E4M3_MIDPOINTS = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest code of values within +-448; a tie goes to the even code, NaN to 0x7F; zero keeps its
    sign.
    """
    magnitude = np.abs(values.astype(np.float64))
    below = np.searchsorted(E4M3_MIDPOINTS, np.nan_to_num(magnitude), side="left")
    tie = np.isin(magnitude, E4M3_MIDPOINTS) & (below % 2 == 1)
    codes = below + tie + np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), E4M3_NAN, codes).astype(np.uint8)


def encode_int8(values: np.ndarray) -> np.ndarray:
    """Nearest integer, a tie to the even one; NaN to 0."""
    return np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0)).astype(np.int8)


def scales(amax: np.float32, code: str, scale_format: str) -> tuple[np.float32, np.float32]:
    """`(scale_inv, multiplier)` of one block, in fp32 steps."""
    largest = np.float32(LARGEST[code])
    if math.isinf(amax):
        return np.float32(math.inf), np.float32(0.0)
    quotient = np.float32(amax / largest)
    if scale_format == "fp32":
        return quotient, np.float32(largest / amax)
    mantissa, exponent = math.frexp(float(quotient))
    power = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
    return np.float32(power), np.float32(1 / power)


def block_amax(block: np.ndarray) -> np.float32:
    """The largest magnitude that is a number, at least the floor."""
    return np.float32(max([AMAX_FLOOR, *np.abs(block[~np.isnan(block)]).ravel().tolist()]))


def quantize_block(
    block: np.ndarray, code: str, scale_format: str, amax: np.float32
) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one block of fp32 values."""
    scale_inv, multiplier = scales(amax, code, scale_format)
    with np.errstate(invalid="ignore"):
        scaled = (block * multiplier).astype(np.float32)
    largest = np.float32(LARGEST[code])
    scaled = np.where(scaled > largest, largest, np.where(scaled < -largest, -largest, scaled))
    if code == "e4m3":
        return encode_e4m3(scaled), scale_inv
    return encode_int8(scaled), np.float32(math.nan) if np.isnan(block).any() else scale_inv


def quantize(
    x: np.ndarray, block_rows: int, block_cols: int, code: str, scale_format: str
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8 bytes of E4M3, or int8) and fp32 scales of fp32 `x [..., R, C]`."""
    *lead, n_rows, n_cols = x.shape
    matrices = x.reshape(-1, n_rows, n_cols).astype(np.float32)
    grid = (-(-n_rows // block_rows), -(-n_cols // block_cols))
    codes = np.zeros(matrices.shape, np.uint8 if code == "e4m3" else np.int8)
    scale_inv = np.zeros((len(matrices), *grid), np.float32)
    for b, i, j in np.ndindex(len(matrices), *grid):
        part = (
            b,
            slice(i * block_rows, (i + 1) * block_rows),
            slice(j * block_cols, (j + 1) * block_cols),
        )
        block = matrices[part]
        codes[part], scale_inv[b, i, j] = quantize_block(
            block, code, scale_format, block_amax(block)
        )
    return codes.reshape(x.shape), scale_inv.reshape(*lead, *grid)


def dequantize(
    codes: np.ndarray, scale_inv: np.ndarray, block_rows: int, block_cols: int
) -> np.ndarray:
    """fp32 `code * scale_inv`, element by element."""
    if codes.dtype == np.uint8:
        table = np.array([decode_e4m3(code) for code in range(256)], np.float32)
        values = table[codes]
    else:
        values = codes.astype(np.float32)
    n_rows, n_cols = codes.shape[-2:]
    spread = scale_inv[..., np.arange(n_rows) // block_rows, :][
        ..., np.arange(n_cols) // block_cols
    ]
    with np.errstate(invalid="ignore", over="ignore"):
        return (values * spread).astype(np.float32)
