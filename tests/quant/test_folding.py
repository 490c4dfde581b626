"""Codes with one scale per row, against the rule written as a loop over elements."""

import math

import naive_quantizer as naive
import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.quant.folding import with_row_scales
from sonicmoe.quant.format import BlockScaledTensor, Code
from sonicmoe.quant.recipes import Line, ScaleFormat, rows
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.quant.tokens import tokens_of

STEADY = rows(128).along(Line.ROW)


def bytes_of(q):
    return numpy(q.codes.view(torch.uint8)).astype(np.uint8)


def naive_fold(codes, scale):
    """`(bytes [T, H], scale [T])`, one element after the other."""
    found, largest = np.zeros_like(codes), scale.max(1)
    for t, h in np.ndindex(*codes.shape):
        own, row = np.float32(scale[t, h // 128]), np.float32(largest[t])
        if own == row:
            found[t, h] = codes[t, h]
            continue
        ratio = np.float32(np.float64(own) / np.float64(row))
        value = np.float32(naive.decode_e4m3(int(codes[t, h]))) * ratio
        found[t, h] = naive.encode_e4m3(np.array([value], np.float32))[0]
    return found, largest


def spread(shape, octaves=20, seed=0):
    """Gaussian rows whose blocks of 128 differ by up to 2^octaves."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(-octaves, 0, (shape[0], -(-shape[1] // 128)))
    return (rng.standard_normal(shape) * 2.0 ** exponents.repeat(128, 1)[:, : shape[1]]).astype(
        np.float32
    )


@pytest.mark.parametrize("scale_format", list(ScaleFormat), ids=lambda s: s.value)
@pytest.mark.parametrize("block", [STEADY, rows(128)], ids=str)
@pytest.mark.parametrize("hidden", [640, 300])
def test_bits_match_the_loop(block, hidden, scale_format):
    q = quantize(tensor(spread((4, hidden))), block, scale_format=scale_format)
    codes, scale = naive_fold(bytes_of(q), numpy(q.scale_inv))
    found = with_row_scales(q)
    np.testing.assert_array_equal(bytes_of(found), codes)
    np.testing.assert_array_equal(numpy(found.scale_inv), scale[:, None])
    assert (codes != bytes_of(q)).any() and found.block == rows(hidden)


def test_a_row_with_one_scale_keeps_every_code():
    """Blocks within 2^10 of the row's amax: nothing is rounded twice."""
    q = quantize(tensor(spread((9, 512), octaves=8)), STEADY)
    found = with_row_scales(q)
    np.testing.assert_array_equal(bytes_of(found), bytes_of(q))
    np.testing.assert_array_equal(numpy(dequantize(found)), numpy(dequantize(q)))
    plain = quantize(tensor(spread((9, 512), octaves=8)), rows(128))
    assert (bytes_of(with_row_scales(plain)) != bytes_of(plain)).any(), "the usual sender's are"


def test_scales_that_others_send():
    """Zero rows, zero blocks, and what is not finite."""
    codes = np.tile(np.array([0x38, 0xB8, 0x7F, 0x00], np.uint8), (5, 64))
    scale = np.array([[0, 0], [0, 2], [math.inf, 1], [math.nan, 1], [1, 1]], np.float32)
    held = tensor(codes.astype(np.int32)).to(torch.uint8).view(torch.float8_e4m3fn)
    found = with_row_scales(tokens_of(held, tensor(scale)))
    np.testing.assert_array_equal(numpy(found.scale_inv)[:, 0], [0, 2, np.inf, np.nan, 1])
    values = numpy(found.codes.to(torch.float32))
    wanted = np.tile([1.0, -1.0, np.nan, 0.0], 32)
    for row, block in ((0, 0), (0, 1), (1, 1), (2, 0), (4, 0), (4, 1)):
        np.testing.assert_array_equal(values[row, 128 * block : 128 * (block + 1)], wanted)
    for row, block in ((1, 0), (2, 1)):  # nothing is left of them beside such a scale
        found = values[row, 128 * block : 128 * (block + 1)]
        np.testing.assert_array_equal(np.nan_to_num(found), np.zeros(128))
    assert np.isnan(values[3]).all()


def test_one_block_and_no_rows():
    one = quantize(tensor(spread((3, 80))), STEADY)
    assert with_row_scales(one).codes is one.codes
    none = quantize(tensor(np.zeros((0, 256), np.float32)), STEADY)
    assert with_row_scales(none).shape == (0, 256)
    wide = quantize(tensor(spread((3, 256))), rows(256))
    assert isinstance(with_row_scales(wide), BlockScaledTensor) and wide.code is Code.E4M3
