"""The adaptive code is INT8, and E4M3 in the blocks of a row whose values lie far apart: the rule, the
codes and scales of either, and what both keep of values beside an outlier.
"""

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.quant.format import Code
from sonicmoe.quant.recipes import ScaleFormat, rows
from sonicmoe.quant.reference import dequantize, has_e4m3, quantize


def is_wide(block):
    """The rule on the 128 values of one block, by its definition."""
    amax = max(abs(v) for v in block)
    if not np.isfinite(amax):
        return False
    largest = [
        max(abs(v) for v in block[first + half : first + 16 : 2])
        for first in range(0, len(block), 16)
        for half in (0, 1)
    ]
    return any(one > 0 and 8 * one < amax for one in largest)


def random_rows(seed=0):
    """fp32 `[96, 384]`: one value of each block up to 2^6 times itself; groups of zeros, NaN, infinity."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((96, 384)) * 2.0 ** rng.integers(-90, 90, (96, 1))
    for row in values:
        row[[5, 140, 300]] *= 2.0 ** rng.uniform(0, 6, 3)
    values[:8, 16:32], values[8:16, 1:17:2], values[16] = 0.0, 0.0, 0.0
    values[17, 5], values[18, 7], values[19, 130] = np.nan, np.inf, -np.inf
    return values.astype(np.float32)


@pytest.mark.parametrize("scales", list(ScaleFormat))
def test_every_block_has_the_code_of_the_rule(scales):
    values = random_rows()
    q = quantize(tensor(values), rows(128), Code.ADAPTIVE, scales)
    both = {
        code: quantize(tensor(values), rows(128), code, scales) for code in (Code.INT8, Code.E4M3)
    }
    wanted = np.array([[is_wide(b) for b in row.reshape(3, 128)] for row in values])
    assert 0.2 < wanted.mean() < 0.8
    found = numpy(q.scale_inv)
    np.testing.assert_array_equal(found < 0, wanted)
    np.testing.assert_array_equal(numpy(has_e4m3(q)), wanted.repeat(128, 1))
    for code, here in ((Code.INT8, ~wanted), (Code.E4M3, wanted)):
        np.testing.assert_array_equal(np.abs(found)[here], numpy(both[code].scale_inv)[here])
        codes = (numpy(x.bytes)[here.repeat(128, 1)] for x in (q, both[code]))
        np.testing.assert_array_equal(*codes)
        restored = (numpy(dequantize(x))[here.repeat(128, 1)] for x in (q, both[code]))
        np.testing.assert_array_equal(*restored)


@pytest.mark.parametrize("gain", [1.0, 10.0, 30.0, 300.0, 3000.0])
def test_an_outlier_leaves_its_neighbours_4_bits(gain):
    values = np.random.default_rng(1).standard_normal((256, 128)).astype(np.float32)
    values[:, 6] *= gain
    errors = {}
    for code in (Code.ADAPTIVE, Code.INT8):
        restored = numpy(dequantize(quantize(tensor(values), rows(128), code)))
        away = np.delete(restored - values, 6, 1), np.delete(values, 6, 1)
        errors[code] = np.linalg.norm(away[0]) / np.linalg.norm(away[1])
    assert errors[Code.ADAPTIVE] < 0.028
    if gain == 1.0:  # values that lie close together keep INT8's seven bits
        assert errors[Code.ADAPTIVE] < 0.008
    assert (errors[Code.INT8] > 0.06) == (gain >= 30.0)


def test_an_empty_tensor_and_a_batch():
    assert quantize(torch.zeros(0, 128), rows(128), Code.ADAPTIVE).code is Code.ADAPTIVE
    values = random_rows(2).reshape(2, 48, 384)
    whole = quantize(tensor(values), rows(128), Code.ADAPTIVE)
    for one, given in zip((whole[0], whole[1]), values, strict=True):
        alone = quantize(tensor(given), rows(128), Code.ADAPTIVE)
        np.testing.assert_array_equal(numpy(one.bytes), numpy(alone.bytes))
        np.testing.assert_array_equal(numpy(dequantize(one)), numpy(dequantize(alone)))
