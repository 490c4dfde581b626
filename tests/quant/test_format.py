"""`BlockScaledTensor` refuses what does not belong together and whatever would read its bytes as
plain numbers.
"""

import operator

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation, scale_shape
from sonicmoe.quant.recipes import BlockShape, iso
from sonicmoe.quant.reference import dequantize, quantize, transpose_storage

ROW_128 = BlockShape(1, 128)


def example(shape=(2, 130, 200), block=ROW_128, code=Code.E4M3):
    return quantize(
        tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32)), block, code
    )


def test_codes_have_the_range_and_storage_of_their_format():
    assert (Code.E4M3.max, Code.INT8.max) == (448.0, 127.0)
    assert (Code.E4M3.dtype, Code.INT8.dtype) == (torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize(
    ("shape", "block", "wanted"),
    [
        ((256, 512), BlockShape(1, 128), (256, 4)),
        ((256, 512), BlockShape(128, 1), (2, 512)),
        ((130, 259), iso(128), (2, 3)),
        ((3, 5, 1, 1), iso(512), (3, 5, 1, 1)),
        ((0, 128), iso(128), (0, 1)),
    ],
)
def test_partial_blocks_count(shape, block, wanted):
    assert scale_shape(shape, block) == wanted


def test_a_vector_has_no_blocks():
    with pytest.raises(ShapeError, match=r"at least two axes, got shape \(7,\)"):
        scale_shape((7,), iso(128))


def test_shape_is_logical_in_both_orientations():
    q = example()
    flipped = transpose_storage(q)
    assert q.shape == flipped.shape == (2, 130, 200)
    assert tuple(flipped.codes.shape) == (2, 200, 130)
    assert tuple(flipped.scale_inv.shape) == (2, 2, 130)
    assert (q.orientation, flipped.orientation) == (Orientation.ROWS, Orientation.COLUMNS)


def test_bytes_are_counted_with_scales():
    assert example().nbytes == 2 * 130 * 200 + 4 * 2 * 130 * 2


@pytest.mark.parametrize("orientation", list(Orientation))
def test_a_batch_is_indexed_by_matrix(orientation):
    q = example()
    whole = numpy(dequantize(q))
    stored = q if orientation is Orientation.ROWS else transpose_storage(q)
    one = stored[1]
    assert one.shape == (130, 200)
    assert one.orientation is orientation
    np.testing.assert_array_equal(numpy(dequantize(one)), whole[1])


def test_rows_of_one_matrix_cannot_be_sliced():
    with pytest.raises(ShapeError, match="slicing rows could cut a block"):
        example(shape=(130, 200))[0]


@pytest.mark.parametrize(("stored", "claimed"), [(Code.E4M3, Code.INT8), (Code.INT8, Code.E4M3)])
def test_codes_of_another_format_are_refused(stored, claimed):
    q = example(code=stored)
    found, needed = ("float8_e4m3fn", "int8") if stored is Code.E4M3 else ("int8", "float8_e4m3fn")
    words = f"codes are {found}, the {claimed.value} code needs {needed}"
    with pytest.raises(DTypeError, match=words):
        BlockScaledTensor(q.codes, q.scale_inv, q.block, claimed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_plain_tensors_are_no_codes(dtype):
    values = tensor(np.ones((4, 128), np.float32)).to(getattr(torch, dtype))
    with pytest.raises(DTypeError, match=f"codes are {dtype}"):
        BlockScaledTensor(values, tensor(np.ones((4, 1), np.float32)), ROW_128, Code.E4M3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_scales_are_fp32(dtype):
    q = example()
    with pytest.raises(DTypeError, match=f"scale_inv is {dtype}, needed: float32"):
        BlockScaledTensor(q.codes, q.scale_inv.to(getattr(torch, dtype)), q.block, q.code)


def test_a_scale_grid_of_the_wrong_shape_is_refused_with_both_shapes():
    q = example()
    with pytest.raises(ShapeError) as caught:
        BlockScaledTensor(q.codes, q.scale_inv.transpose(-2, -1).contiguous(), q.block, q.code)
    shapes = "scale_inv has shape (2, 2, 130)", "codes (2, 130, 200)", "need (2, 130, 2)"
    assert all(part in str(caught.value) for part in (*shapes, "1x128 blocks"))


def test_scales_of_the_other_orientation_are_refused():
    q = example()
    with pytest.raises(ShapeError, match="128x1 blocks need"):
        BlockScaledTensor(q.codes, q.scale_inv, q.block, q.code, Orientation.COLUMNS)


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


@pytest.mark.parametrize(
    "call", [operator.neg, abs, float, lambda q: torch.matmul(q, q), lambda q: q.to(torch.float32)]
)
def test_it_is_no_tensor_and_no_number(call):
    q = example(shape=(128, 128))
    assert not isinstance(q, torch.Tensor)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        call(q)


def test_it_cannot_be_rebound():
    with pytest.raises(AttributeError):
        example().block = iso(128)
