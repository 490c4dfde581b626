"""The exact quantiser every GPU kernel is tested against, bit for bit. Plain tensor operations,
fp32.

For each block:  amax = max |x| over the non-NaN elements, at least AMAX_FLOOR
    FP32 scales: scale_inv = amax / M,  multiplier = M / amax            (two IEEE divisions; M = 448 or 127)
    POW2 scales: scale_inv = 2^ceil(log2(fl(amax / M))), multiplier = its exact inverse
    code = round-to-nearest-even(clamp(fl(x * multiplier), -M, M))

The adaptive code has INT8 in a block whose values lie close together and E4M3, with a negative scale,
in one that `_is_wide` names: an outlier would leave its neighbours no bits of INT8.

Infinity makes amax, and with it scale_inv, infinite: every value of the block dequantises to NaN,
so a non-finite input is never laundered into a finite one. AMAX_FLOOR keeps both divisions finite;
an all-zero block gets codes 0 and a finite scale. The block scaling is that of DeepSeek-V3
(arXiv:2412.19437, section 3.3), the format OCP FP8 (E4M3).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import DTypeError, ShapeError, expect
from ..interop import dtype_name, is_cuda, numel
from .format import E4M3_NAN, BlockScaledTensor, Code, Orientation, scale_shape
from .recipes import BlockShape, ScaleFormat

Tensor = torch.Tensor

AMAX_FLOOR = 2.0**-100
# Of the adaptive code: pairs whose maxima are compared, and how far below the block's they may lie.
GROUP, SPREAD = 8, 8.0
_MANTISSA_MASK = 0x007FFFFF


def quantize(
    x: Tensor,
    block: BlockShape,
    code: Code = Code.E4M3,
    scale_format: ScaleFormat = ScaleFormat.FP32,
) -> BlockScaledTensor:
    """Quantise a floating `[..., R, C]` tensor block by block; edge blocks may be partial.

    NaN elements keep their place in E4M3 (code 0x7F) and do not disturb their block's scale; in
    INT8 they, and in both codes an infinity, make the whole block NaN.
    """
    words = f"x is {dtype_name(x.dtype)}, needed: float32, bfloat16 or float16"
    expect(dtype_name(x.dtype) in {"float32", "bfloat16", "float16", "float64"}, DTypeError, words)
    if code is Code.ADAPTIVE:
        return _quantize_adaptive(x, block, scale_format)
    x = x.detach().to(torch.float32)
    shape = tuple(int(size) for size in x.shape)
    if numel(x) == 0:
        return _empty(x, shape, block, code)
    tiles = _to_tiles(x, block)  # [..., nR, bR, nC, bC]
    amax = tiles.abs().amax((-3, -1))
    has_nan = torch.isnan(amax)
    # A NaN must not decide the scale of its finite neighbours, so the maximum leaves NaN out.
    # Infinity stays in: it makes the scale infinite, and so the whole block non-finite.
    if _perhaps_any(has_nan):
        amax = torch.where(torch.isnan(tiles), torch.zeros_like(tiles), tiles).abs().amax((-3, -1))
    # Not clamp(min=): Paddle's would make infinity finite.
    amax = torch.maximum(amax, torch.full_like(amax, AMAX_FLOOR))
    scale_inv, multiplier = block_scales(amax, code, scale_format)
    # `amax * multiplier` can round to just above M, so the product is clamped before it is encoded.
    # Infinity times the multiplier 0 is NaN, which the clamp keeps.
    scaled = (tiles * multiplier.unsqueeze(-1).unsqueeze(-3)).clamp(-code.max, code.max)
    if code is Code.E4M3:
        return BlockScaledTensor(_from_tiles(encode_e4m3(scaled), shape), scale_inv, block, code)
    scale_inv = torch.where(has_nan, torch.full_like(scale_inv, float("nan")), scale_inv)
    # INT8 has no code for NaN. The scale is NaN already, so the code may be anything; casting NaN
    # to an integer is undefined, so it is 0.
    finite = torch.where(torch.isnan(scaled), torch.zeros_like(scaled), scaled)
    return BlockScaledTensor(
        _from_tiles(torch.round(finite).to(torch.int8), shape), scale_inv, block, code
    )


def _quantize_adaptive(
    x: Tensor, block: BlockShape, scale_format: ScaleFormat
) -> BlockScaledTensor:
    """INT8 codes, but E4M3 codes and a negative scale in the blocks that `_is_wide` names."""
    as_int8 = quantize(x, block, Code.INT8, scale_format)
    if numel(x) == 0:
        return replace(as_int8, code=Code.ADAPTIVE)
    as_e4m3 = quantize(x, block, Code.E4M3, scale_format)
    wide = _is_wide(x, block)
    scale_inv = torch.where(wide, -as_e4m3.scale_inv, as_int8.scale_inv)
    # Paddle's CPU `where` knows no 8-bit integers.
    small, large = (q.codes.view(torch.int8).to(torch.int32) for q in (as_int8, as_e4m3))
    codes = torch.where(_per_element(wide, block, as_int8.shape), large, small)
    return BlockScaledTensor(codes.to(torch.int8), scale_inv, block, Code.ADAPTIVE)


def _is_wide(x: Tensor, block: BlockShape) -> Tensor:
    """bool, one per block of one row: whether E4M3 keeps its values better than INT8.

    The columns are (gate, up) pairs. A block is wide where the largest |gate| or the largest |up| of
    some 8 neighbouring pairs lies below an eighth of the block's amax: INT8, whose step is amax /
    127, would leave those values less than E4M3's 4 bits. Groups of zeros do not count, because both
    codes keep them. Maxima and a power of two make the comparison exact in any order.
    """
    words = f"blocks are {block}; the adaptive code needs blocks of one row and of 16 n columns"
    expect(block.rows == 1 and block.cols % (2 * GROUP) == 0, ShapeError, words)
    tiles = _to_tiles(x.detach().to(torch.float32), block).abs().squeeze(-3)
    groups = tiles.reshape([*tiles.shape[:-1], block.cols // (2 * GROUP), GROUP, 2]).amax(-2)
    infinite = torch.full_like(groups, float("inf"))
    least = torch.where(groups > 0.0, groups, infinite).flatten(-2).amin(-1)
    amax = groups.flatten(-2).amax(-1)
    return (least * SPREAD < amax) & (amax < float("inf"))


def _per_element(of_blocks: Tensor, block: BlockShape, shape: tuple[int, ...]) -> Tensor:
    """A bool for each block, as one for each element of `[..., R, C]`."""
    ones = torch.ones(of_blocks.shape, dtype=torch.int32, device=of_blocks.device)
    chosen = (ones * of_blocks.to(torch.int32)).unsqueeze(-1).unsqueeze(-3)
    *lead, rows, _, cols, _ = (int(size) for size in chosen.shape)
    return _from_tiles(chosen.expand([*lead, rows, block.rows, cols, block.cols]), shape) != 0


def block_scales(amax: Tensor, code: Code, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """`(scale_inv, multiplier)` of blocks with maximum magnitude `amax` (fp32, >= AMAX_FLOOR)."""
    largest = torch.full_like(amax, code.max)
    if scale_format is ScaleFormat.FP32:
        return divide(amax, largest), divide(largest, amax)
    # Rounding up keeps the largest value inside the range of the code.
    scale_inv = round_up_to_pow2(divide(amax, largest))
    return scale_inv, divide(torch.ones_like(scale_inv), scale_inv)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """The fp32 quotient rounded to nearest even, as IEEE 754 asks.

    Paddle's fp32 division on CPU is off by one unit in some 0.3 % of cases, so this divides in fp64
    and rounds the result. Rounding twice is harmless here: no quotient of two fp32 numbers lies so
    close to the middle between two fp32 numbers that the rounding to fp64 could move it across.
    """
    return (a.to(torch.float64) / b.to(torch.float64)).to(torch.float32)


def round_up_to_pow2(x: Tensor) -> Tensor:
    """The smallest power of two >= x for positive normal fp32 x, by exponent arithmetic (exact);
    infinity stays.
    """
    # Adding the mask carries into the exponent unless the mantissa is zero, that is, unless x is a
    # power of two already. The shifts then clear the mantissa.
    bits = x.view(torch.int32)
    return (((bits + _MANTISSA_MASK) >> 23) << 23).view(torch.float32)


def encode_e4m3(x: Tensor) -> Tensor:
    """fp32 within +-448 -> E4M3, round to nearest even, NaN -> 0x7F.

    The NaN is written explicitly: Paddle's CPU cast turns it into 448.
    """
    codes = x.to(torch.float8_e4m3fn)
    is_nan = torch.isnan(x)
    if not _perhaps_any(is_nan):
        return codes
    bits = codes.view(torch.uint8).to(torch.int32)  # Paddle's CPU `where` knows no uint8
    bits = torch.where(is_nan, torch.full_like(bits, E4M3_NAN), bits)
    return bits.to(torch.uint8).view(torch.float8_e4m3fn)


def _perhaps_any(mask: Tensor) -> bool:
    """False only where no element is set."""
    # A GPU is not asked, because that waits for it.
    return is_cuda(mask) or bool(mask.any())


def dequantize(q: BlockScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logical `[..., R, C]` values `fl32(code * scale_inv)`, cast to `dtype`."""
    if q.orientation is Orientation.COLUMNS:
        q = transpose_storage(q)
    shape = q.shape
    if any(size == 0 for size in shape):
        return torch.zeros(shape, dtype=dtype, device=q.codes.device)
    # One fp32 product an element, as the kernels have it: no other order could give their bits.
    scales = q.scale_inv.abs() if q.code is Code.ADAPTIVE else q.scale_inv
    tiles = _to_tiles(_code_values(q), q.block) * scales.unsqueeze(-1).unsqueeze(-3)
    return _from_tiles(tiles, shape).to(dtype)


def _code_values(q: BlockScaledTensor) -> Tensor:
    """fp32 values of the codes by rows, before their scales."""
    if q.code is not Code.ADAPTIVE:
        return q.codes.to(torch.float32)
    as_e4m3 = q.codes.view(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(has_e4m3(q), as_e4m3, q.codes.to(torch.float32))


def has_e4m3(q: BlockScaledTensor) -> Tensor:
    """bool `[..., R, C]`: whether an element of an adaptive tensor lies in a block of E4M3 codes."""
    return _per_element(q.scale_inv < 0.0, q.block, q.shape)


def transpose_storage(q: BlockScaledTensor) -> BlockScaledTensor:
    """The logical matrix in the other memory order: moves bytes and scales, rounds nothing."""
    flipped = Orientation.COLUMNS if q.orientation is Orientation.ROWS else Orientation.ROWS
    # Moved as bytes: a transposition of codes knows nothing of their format.
    view = torch.uint8 if q.code is Code.E4M3 else torch.int8
    codes = q.codes.view(view).transpose(-2, -1).contiguous().view(q.code.dtype)
    return BlockScaledTensor(
        codes, q.scale_inv.transpose(-2, -1).contiguous(), q.block, q.code, flipped
    )


def _to_tiles(x: Tensor, block: BlockShape) -> Tensor:
    """`[..., R, C]` -> `[..., nR, bR, nC, bC]`, zero-padded to whole blocks."""
    *lead, n_rows, n_cols = (int(size) for size in x.shape)
    *_, row_blocks, col_blocks = scale_shape(tuple(x.shape), block)
    pad_rows, pad_cols = row_blocks * block.rows - n_rows, col_blocks * block.cols - n_cols

    def zeros(n_rows: int, n_cols: int) -> Tensor:
        return torch.zeros([*lead, n_rows, n_cols], dtype=x.dtype, device=x.device)

    # Zeros decide no amax, so a partial block has the scale of its own elements.
    if pad_cols:
        x = torch.cat([x, zeros(n_rows, pad_cols)], -1)
    if pad_rows:
        x = torch.cat([x, zeros(pad_rows, n_cols + pad_cols)], -2)
    return x.reshape([*lead, row_blocks, block.rows, col_blocks, block.cols])


def _from_tiles(tiles: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Inverse of `_to_tiles`: drops the padding."""
    *lead, row_blocks, block_rows, col_blocks, block_cols = (int(size) for size in tiles.shape)
    n_rows, n_cols = shape[-2:]
    whole = tiles.reshape([*lead, row_blocks * block_rows, col_blocks * block_cols])
    if tuple(whole.shape[-2:]) == (n_rows, n_cols):
        return whole
    if whole.dtype == torch.float8_e4m3fn:
        # Slicing, too, is done on bytes.
        return whole.view(torch.uint8)[..., :n_rows, :n_cols].contiguous().view(torch.float8_e4m3fn)
    return whole[..., :n_rows, :n_cols].contiguous()


def _empty(x: Tensor, shape: tuple[int, ...], block: BlockShape, code: Code) -> BlockScaledTensor:
    byte = torch.uint8 if code is Code.E4M3 else torch.int8
    codes = torch.zeros(shape, dtype=byte, device=x.device).view(code.dtype)
    scales = torch.zeros(scale_shape(shape, block), dtype=torch.float32, device=x.device)
    return BlockScaledTensor(codes, scales, block, code)
