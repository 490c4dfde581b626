"""`BlockScaledTensor` refuses what does not belong together and whatever would read its bytes as
plain numbers.
"""

import operator

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.recipes import BlockShape
from sonicmoe.quant.reference import dequantize, quantize, transpose_storage

ROW_128 = BlockShape(1, 128)


def example(shape=(2, 130, 200), block=ROW_128, code=Code.E4M3):
    return quantize(
        tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32)), block, code
    )


@pytest.mark.parametrize("orientation", list(Orientation))
def test_a_batch_is_indexed_by_matrix(orientation):
    q = example()
    whole = numpy(dequantize(q))
    stored = q if orientation is Orientation.ROWS else transpose_storage(q)
    one = stored[1]
    assert one.shape == (130, 200)
    assert one.orientation is orientation
    np.testing.assert_array_equal(numpy(dequantize(one)), whole[1])


def plain(dtype):
    return tensor(np.ones((4, 128), np.float32)).to(getattr(torch, dtype))


def scale_of(q, dtype):
    return q.scale_inv.to(getattr(torch, dtype))


E4M3, INT8 = example(), example(code=Code.INT8)
ONE = tensor(np.ones((4, 1), np.float32))
SHAPES = (
    r"scale_inv has shape \(2, 2, 130\).* codes \(2, 130, 200\) in 1x128 blocks need \(2, 130, 2\)"
)
REFUSED = (
    (DTypeError, "codes are float8_e4m3fn, the int8 code needs int8",
     (E4M3.codes, E4M3.scale_inv, ROW_128, Code.INT8)),
    (DTypeError, "codes are int8, the e4m3 code needs float8_e4m3fn",
     (INT8.codes, INT8.scale_inv, ROW_128, Code.E4M3)),
    *((DTypeError, f"codes are {dtype}", (plain(dtype), ONE, ROW_128, Code.E4M3))
      for dtype in ("bfloat16", "float32", "uint8")),
    *((DTypeError, f"scale_inv is {dtype}, needed: float32",
       (E4M3.codes, scale_of(E4M3, dtype), ROW_128, Code.E4M3))
      for dtype in ("bfloat16", "float16", "float64")),
    (ShapeError, SHAPES,
     (E4M3.codes, E4M3.scale_inv.transpose(-2, -1).contiguous(), ROW_128, Code.E4M3)),
    # Scales of the other orientation.
    (ShapeError, "128x1 blocks need",
     (E4M3.codes, E4M3.scale_inv, ROW_128, Code.E4M3, Orientation.COLUMNS)),
)  # fmt: skip


@pytest.mark.parametrize(("error", "words", "parts"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_belong_together_is_refused(error, words, parts):
    with pytest.raises(error, match=words):
        BlockScaledTensor(*parts)


@pytest.mark.parametrize(
    "operation", [operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul]
)
@pytest.mark.parametrize("code", list(Code))
def test_arithmetic_is_refused_on_both_sides(operation, code):
    q = example(shape=(128, 128), code=code)
    plain = tensor(np.ones((128, 128), np.float32))
    for left, right in ((q, plain), (plain, q), (q, q), (q, 2.0)):
        with pytest.raises((TypeError, ValueError)):
            operation(left, right)
