"""The host's face of the weight-gradient operands: the exact quantiser on gathered rows,
transposed; and the checks at its border.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.quant.format import Orientation
from sonicmoe.quant.gpu_wgrad import (
    gather_transpose_quantize,
    gather_transpose_quantize_pair,
    transpose_codes,
)
from sonicmoe.quant.recipes import iso, rows
from sonicmoe.quant.reference import dequantize, quantize

OFFSETS = tensor(np.array([0, 128, 256]))


def tokens(width=144, count=40, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def row_tokens(count=40, size=256, seed=1):
    """Tokens of two experts of 100 and 60 rows; the others are padding."""
    out = np.full(size, -1, np.int32)
    rng = np.random.default_rng(seed)
    out[:100], out[128:188] = rng.integers(0, count, 100), rng.integers(0, count, 60)
    return out


def test_rows_are_gathered_and_padding_is_zero():
    x, row_token = tokens(), row_tokens()
    q = gather_transpose_quantize(tensor(x), tensor(row_token), OFFSETS)
    assert q.orientation is Orientation.COLUMNS
    assert tuple(q.codes.shape) == (144, 256) and tuple(q.scale_inv.shape) == (2, 2)
    gathered = np.where(row_token[:, None] >= 0, x[row_token], 0)
    want = quantize(tensor(gathered), iso(128))
    np.testing.assert_array_equal(
        numpy(q.codes.view(torch.uint8)), numpy(want.codes.view(torch.uint8)).T
    )
    np.testing.assert_array_equal(numpy(q.scale_inv), numpy(want.scale_inv).T)
    np.testing.assert_array_equal(numpy(dequantize(q)), numpy(dequantize(want)))


def test_tokens_without_a_row_are_not_read():
    x, row_token = tokens(), row_tokens()
    x[3] = np.nan
    row_token[row_token == 3] = -1
    q = gather_transpose_quantize(tensor(x), tensor(row_token), OFFSETS)
    assert np.isfinite(numpy(dequantize(q))).all()


def test_pair_is_both():
    x, dout, row_token = tokens(), tokens(seed=5), tensor(row_tokens())
    for got, source in zip(
        gather_transpose_quantize_pair(tensor(x), tensor(dout), row_token, OFFSETS),
        (x, dout),
        strict=True,
    ):
        want = gather_transpose_quantize(tensor(source), row_token, OFFSETS)
        np.testing.assert_array_equal(
            numpy(got.codes.view(torch.uint8)), numpy(want.codes.view(torch.uint8))
        )


def test_transpose_codes_moves_bytes():
    q = quantize(tensor(tokens(144, 256)), iso(128))
    got = transpose_codes(q, OFFSETS)
    np.testing.assert_array_equal(numpy(dequantize(got)), numpy(dequantize(q)))
    np.testing.assert_array_equal(
        numpy(got.codes.view(torch.uint8)), numpy(q.codes.view(torch.uint8)).T
    )


@pytest.mark.parametrize(
    ("width", "token", "size", "error", "words"),
    [
        (140, np.int32, 256, ShapeError, "140 columns; needed: a multiple of 16"),
        (144, np.int32, 200, ShapeError, "200 rows; needed: a multiple of 128"),
        (144, np.int64, 256, DTypeError, "row_token is int64"),
    ],
)
def test_border(width, token, size, error, words):
    with pytest.raises(error, match=words):
        gather_transpose_quantize(
            tensor(tokens(width)), tensor(row_tokens(size=256)[:size].astype(token)), OFFSETS
        )


def test_border_of_values_offsets_and_pairs():
    x, row_token = tensor(tokens()), tensor(row_tokens())
    with pytest.raises(DTypeError, match="x is int32"):
        gather_transpose_quantize(x.to(torch.int32), row_token, OFFSETS)
    with pytest.raises(DTypeError, match="padded_offsets is int32"):
        gather_transpose_quantize(x, row_token, OFFSETS.to(torch.int32))
    with pytest.raises(ShapeError, match="dout has shape"):
        gather_transpose_quantize_pair(x, x[:5], row_token, OFFSETS)
    with pytest.raises(DTypeError, match="dout is bfloat16"):
        gather_transpose_quantize_pair(x, x.to(torch.bfloat16), row_token, OFFSETS)
    with pytest.raises(DTypeError, match="1x128 blocks by rows; needed: e4m3 in 128x128"):
        transpose_codes(quantize(tensor(tokens(144, 256)), rows(128)), OFFSETS)
