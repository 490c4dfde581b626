"""`BlockScaledTensor` refuses what does not belong together and whatever would read its bytes as
plain numbers.
"""

import operator

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.quant.format import Code, Orientation
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
