"""Codes and scales of the quantiser, bit for bit against one written from the formats' definitions,
and its properties.
"""

import math
import operator

import naive_quantizer as naive
import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe.quant import reference
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.recipes import BlockShape, ScaleFormat, iso
from sonicmoe.quant.reference import dequantize, encode_e4m3, quantize, transpose_storage

# The adaptive code is these two by blocks (test_adaptive_code.py).
CODES, SCALES = [Code.E4M3, Code.INT8], list(ScaleFormat)
FLT_MAX = float(np.finfo(np.float32).max)
both = pytest.mark.parametrize("code", CODES, ids=lambda c: c.value)
scale_formats = pytest.mark.parametrize("scale_format", SCALES, ids=lambda s: s.value)

# Shapes leave partial blocks at the right edge, the bottom edge, both, or none; some have a batch
# axis.
BLOCKS_AND_SHAPES = [
    (BlockShape(1, 128), (5, 384)),
    (BlockShape(1, 128), (3, 300)),
    (BlockShape(1, 128), (2, 3, 130)),
    (BlockShape(128, 1), (256, 5)),
    (BlockShape(128, 1), (3, 200, 4)),
    (BlockShape(128, 128), (256, 128)),
    (BlockShape(128, 128), (130, 259)),
    (BlockShape(128, 128), (2, 3, 129, 100)),
    (BlockShape(256, 256), (257, 300)),
    (BlockShape(512, 512), (513, 520)),
    (BlockShape(512, 512), (100, 60)),
    (BlockShape(1, 512), (4, 1100)),
    (BlockShape(128, 256), (2, 140, 300)),
]


def code_bits(q):
    """The stored codes as numpy: uint8 bytes of E4M3, or int8."""
    if q.code is Code.E4M3:
        return numpy(q.codes.view(torch.uint8)).astype(np.uint8)
    return numpy(q.codes).astype(np.int8)


def bits(array):
    """fp32 bit patterns; every NaN counts as the same one."""
    array = np.asarray(array, np.float32)
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def as_fp32(value):
    return numpy(value).astype(np.float32)


def assert_same_row(values, code, scale_format, width=None):
    """`assert_same_bits` of values in one row, in blocks of `width`, or all in one."""
    block = BlockShape(1, width or len(values))
    return assert_same_bits(tensor(np.float32(values).reshape(1, -1)), block, code, scale_format)


def assert_same_bits(x, block, code, scale_format):
    """`x`: a tensor of the framework; returns its quantisation after comparing it with the naive
    one.
    """
    q = quantize(x, block, code, scale_format)
    codes, scale_inv = naive.quantize(
        as_fp32(x), block.rows, block.cols, code.value, scale_format.value
    )
    assert q.block == block
    np.testing.assert_array_equal(code_bits(q), codes)
    np.testing.assert_array_equal(bits(as_fp32(q.scale_inv)), bits(scale_inv))
    restored = naive.dequantize(codes, scale_inv, block.rows, block.cols)
    np.testing.assert_array_equal(bits(as_fp32(dequantize(q))), bits(restored))
    return q


def wide_range(shape, seed=0):
    """Values over 24 octaves with both signs, some exact zeros: reaches the subnormal codes of
    every block.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.uniform(-20, 4, shape)
    return np.where(rng.random(shape) < 0.02, 0.0, values).astype(np.float32)


@both
@scale_formats
@pytest.mark.parametrize(
    ("block", "shape"), BLOCKS_AND_SHAPES, ids=lambda v: str(v).replace(" ", "")
)
def test_bits_match_the_naive_quantizer(block, shape, code, scale_format):
    assert_same_bits(tensor(wide_range(shape)), block, code, scale_format)


@both
@scale_formats
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_inputs_are_widened_exactly(dtype, code, scale_format):
    x = tensor(wide_range((130, 200)), getattr(torch, dtype))
    assert_same_bits(x, iso(128), code, scale_format)


SPECIAL_BLOCKS = {
    "zeros": [0.0, -0.0, 0.0, -0.0],
    "one value": [3.7, 0.0, 0.0, -0.0],
    "fp32 subnormals only": [1e-40, -1e-45, 0.0, 1.1e-38],
    "subnormals beside ones": [1.0, 1e-40, -1e-40, 2e-38],
    "amax below the floor": [2.0**-110, -(2.0**-105), 2.0**-101, 0.0],
    "amax at the floor": [2.0**-100, -(2.0**-100), 2.0**-101, 2.0**-104],
    "largest fp32": [FLT_MAX, -FLT_MAX, 1.0, FLT_MAX / 3],
    "exactly 448": [448.0, -448.0, 447.99997, 432.0],
    "just above 448": [448.00003, -448.0, 440.0, 1.0],
    "a NaN among numbers": [math.nan, 1.0, -2.0, 0.5],
    "nothing but NaN": [math.nan] * 4,
    "infinity": [math.inf, 1.0, 0.0, -3.0],
    "both infinities and NaN": [math.inf, -math.inf, math.nan, 1.0],
}


@both
@scale_formats
@pytest.mark.parametrize("values", SPECIAL_BLOCKS.values(), ids=SPECIAL_BLOCKS)
def test_special_values_have_the_defined_bits(values, code, scale_format):
    x = np.stack([np.float32(values), np.float32([1.0, -0.25, 0.125, 3.0])])
    q = assert_same_bits(tensor(x), BlockShape(1, 4), code, scale_format)
    restored = as_fp32(dequantize(q))
    assert not np.isfinite(restored[~np.isfinite(x)]).any(), "a non-finite element came back finite"
    assert np.isfinite(restored[1]).all(), "a block was disturbed by its neighbour"
    if np.isinf(x).any():
        assert np.isnan(restored[0]).all(), "a block with an infinity must be NaN throughout"


@scale_formats
def test_rounding_ties_go_to_the_even_code(scale_format):
    """amax 448 makes the scale 1, so the midpoints between codes arrive exactly at the rounding
    step.
    """
    ties = np.concatenate([naive.E4M3_MIDPOINTS, -naive.E4M3_MIDPOINTS]).astype(np.float32)
    beside = (np.nextafter(ties, np.float32(towards)) for towards in (np.inf, -np.inf))
    q = assert_same_row(np.concatenate([ties, *beside, [448.0]]), Code.E4M3, scale_format)
    assert (code_bits(q)[0, : len(ties)] % 2 == 0).all()
    halves = np.arange(-126.5, 127, 1.0, dtype=np.float32)
    q = assert_same_row(np.append(halves, 127.0), Code.INT8, scale_format)
    assert (code_bits(q)[0, : len(halves)] % 2 == 0).all()


@both
@scale_formats
def test_values_a_rounding_away_from_a_tie_have_the_naive_bits(code, scale_format):
    """Here the last bit of the multiplier decides the code: it must be its own division, not the
    inverse of the scale.
    """
    rng = np.random.default_rng(8)
    amax = rng.uniform(1.0, 2.0, (1500, 1)).astype(np.float32)
    midpoints = naive.E4M3_MIDPOINTS[60:] if code is Code.E4M3 else np.arange(60) + 0.5
    near = (rng.choice(midpoints, (1500, 3)) * (amax / code.max)).astype(np.float32)
    x = tensor(np.concatenate([amax, near], axis=1))
    assert_same_bits(x, BlockShape(1, 4), code, scale_format)


def test_every_e4m3_code_survives_decoding_and_encoding():
    every = np.arange(256, dtype=np.uint8)
    codes = tensor(every.astype(np.int64)).to(torch.uint8).view(torch.float8_e4m3fn)
    one, block = tensor(np.ones((1, 1), np.float32)), BlockShape(1, 256)
    values = dequantize(BlockScaledTensor(codes.reshape([1, 256]), one, block, Code.E4M3))
    wanted = [[naive.decode_e4m3(int(code)) for code in every]]
    np.testing.assert_array_equal(bits(as_fp32(values)), bits(wanted))
    back = numpy(encode_e4m3(values).view(torch.uint8))
    expected = np.where(every == 0xFF, 0x7F, every)  # NaN has no sign to keep
    np.testing.assert_array_equal(back[0], expected)


@both
@scale_formats
@pytest.mark.parametrize("block", [iso(128), BlockShape(1, 128), BlockShape(128, 256)], ids=str)
def test_transposing_storage_moves_bytes_only(block, code, scale_format):
    x = wide_range((2, 130, 300), seed=5)
    q = quantize(tensor(x), block, code, scale_format)
    flipped = transpose_storage(q)
    assert flipped.orientation is Orientation.COLUMNS
    assert flipped.shape == q.shape
    assert flipped.nbytes == q.nbytes
    np.testing.assert_array_equal(code_bits(flipped), code_bits(q).transpose(0, 2, 1))
    turned = as_fp32(q.scale_inv).transpose(0, 2, 1)
    np.testing.assert_array_equal(as_fp32(flipped.scale_inv), turned)
    np.testing.assert_array_equal(bits(as_fp32(dequantize(flipped))), bits(as_fp32(dequantize(q))))
    for whole in (q, flipped):  # a batch is indexed by matrix
        assert whole[1].shape == (130, 300) and whole[1].orientation is whole.orientation
        np.testing.assert_array_equal(as_fp32(dequantize(whole[1])), as_fp32(dequantize(q))[1])
    back = transpose_storage(flipped)
    assert back.orientation is Orientation.ROWS
    np.testing.assert_array_equal(code_bits(back), code_bits(q))


@both
@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 7, 128), (3, 0, 128)])
def test_empty_tensors_quantize_to_empty_ones(shape, code):
    q = quantize(tensor(np.zeros(shape, np.float32)), iso(128), code)
    assert q.shape == shape
    assert tuple(dequantize(q).shape) == shape


@pytest.mark.parametrize(
    "operation", [operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul]
)
@pytest.mark.parametrize("code", list(Code))
def test_codes_are_no_numbers(operation, code):
    """Nobody computes with their bytes, on either side."""
    plain = tensor(np.ones((128, 128), np.float32))
    q = quantize(plain, BlockShape(1, 128), code)
    for left, right in ((q, plain), (plain, q), (q, q), (q, 2.0)):
        with pytest.raises((TypeError, ValueError)):
            operation(left, right)


any_float = st.floats(width=32)
quick = settings(max_examples=200, deadline=None)


@quick
@given(
    st.lists(any_float, min_size=1, max_size=24), st.sampled_from(CODES), st.sampled_from(SCALES)
)
def test_any_row_has_the_naive_bits(values, code, scale_format):
    """NaN and infinities among them, which therefore stay what they are and where they are."""
    assert_same_row(values, code, scale_format, width=8)


@pytest.mark.parametrize("held", [[1.0, 2.0], [math.nan, 500.0], [math.nan, math.inf]])
def test_a_gpu_is_not_asked_for_nan_and_gives_the_same_bits(held, monkeypatch):
    x = tensor(np.array([[*held, 3.0, -0.25]], np.float32))
    for code in CODES:
        asked = quantize(x, BlockShape(1, 4), code)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "is_cuda", lambda _: True)
            patch.setattr(type(x), "any", None)
            unasked = quantize(x, BlockShape(1, 4), code)
        np.testing.assert_array_equal(code_bits(unasked), code_bits(asked))
        np.testing.assert_array_equal(*(bits(as_fp32(q.scale_inv)) for q in (unasked, asked)))
