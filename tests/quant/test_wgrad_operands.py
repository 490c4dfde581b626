"""The host's face of `transpose_codes`, and the checks at its border."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.quant.format import Orientation
from sonicmoe.quant.gpu_wgrad import transpose_codes
from sonicmoe.quant.recipes import iso, rows
from sonicmoe.quant.reference import dequantize, quantize

SQUARE = iso(128)
OFFSETS = tensor(np.array([0, 128, 256]))


def quantised(shape=(256, 144), block=SQUARE):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return quantize(tensor(values), block)


def test_it_moves_bytes():
    q = quantised()
    got = transpose_codes(q, OFFSETS)
    assert got.orientation is Orientation.COLUMNS
    np.testing.assert_array_equal(numpy(dequantize(got)), numpy(dequantize(q)))
    np.testing.assert_array_equal(
        numpy(got.codes.view(torch.uint8)), numpy(q.codes.view(torch.uint8)).T
    )


def test_border():
    with pytest.raises(DTypeError, match="1x128 blocks by rows; needed: e4m3 in 128x128"):
        transpose_codes(quantised(block=rows(128)), OFFSETS)
    with pytest.raises(ShapeError, match="140 columns; needed: a multiple of 16"):
        transpose_codes(quantised((256, 140)), OFFSETS)
    with pytest.raises(ShapeError, match="200 rows; needed: a multiple of 128"):
        transpose_codes(quantised((200, 144)), OFFSETS)
    with pytest.raises(DTypeError, match="padded_offsets is int32"):
        transpose_codes(quantised(), OFFSETS.to(torch.int32))
