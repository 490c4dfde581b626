"""The faces of the GPU quantisers where no GPU is needed: host tensors, layouts, and what they
refuse.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.errors import DTypeError, LayoutError, ShapeError
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import gpu
from sonicmoe.quant.format import Orientation
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.weight_source import WeightSource

EXPERTS, HIDDEN, INTER = 2, 48, 144


def native_weights(seed=0, n1=2 * INTER):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal(s).astype(np.float32)
        for s in ((EXPERTS, n1, HIDDEN), (EXPERTS, HIDDEN, INTER))
    )


def source_of(w1, w2, transposed, split_half):
    """The user's matrices whose native form is `w1`, `w2`."""
    up = np.concatenate([w1[:, ::2], w1[:, 1::2]], 1) if split_half else w1
    matrices = [a.transpose(0, 2, 1) if transposed else a for a in (up, w2)]
    up, down = (tuple(tensor(np.ascontiguousarray(matrix)) for matrix in a) for a in matrices)
    return WeightSource(up, down, WeightLayout(transposed, split_half))


def same(a, b):
    assert a.block == b.block and a.orientation == b.orientation
    assert np.array_equal(numpy(a.codes.view(torch.uint8)), numpy(b.codes.view(torch.uint8)))
    assert np.array_equal(numpy(a.scale_inv), numpy(b.scale_inv))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split_half", [False, True])
@pytest.mark.parametrize("iso_weight", [False, True])
def test_every_layout_gives_the_native_codes(transposed, split_half, iso_weight):
    native = native_weights()
    weights = gpu.QuantizedWeights(iso_weight)
    weights.update(source_of(*native, transposed, split_half))
    both, dgrads = (weights.w1, weights.w2), (weights.w1_dgrad, weights.w2_dgrad)
    blocks = gpu.W1_BLOCK, gpu.W2_BLOCK
    for ours, dgrad, block, values in zip(both, dgrads, blocks, native, strict=True):
        wanted = quantize(tensor(values), block)
        same(ours, wanted)
        assert dgrad.orientation is Orientation.COLUMNS
        assert tuple(dgrad.codes.shape[1:]) == values.shape[:0:-1]
        assert np.array_equal(numpy(dequantize(dgrad)), numpy(dequantize(wanted)))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((4, 24), np.float32), ShapeError, r"x has shape \(4, 24\); needed: \[T, C\] with C a multiple of 16"),
        (np.zeros((2, 4, 16), np.float32), ShapeError, r"x has shape \(2, 4, 16\)"),
        (np.zeros((4, 16), np.float64), DTypeError, "x is float64; needed: bfloat16, float16 or float32"),
    ],
)  # fmt: skip
def test_rows_border(x, error, message):
    with pytest.raises(error, match=message):
        gpu.quantize_rows(tensor(x))


def zeros(*shape, dtype=np.float32):
    return tensor(np.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("up", "down", "transposed", "error", "message"),
    [
        (zeros(16, 64), zeros(24, 16), True, ShapeError, "N1=64, H=16, I=24; needed: multiples of 16"),
        (zeros(16, 64), zeros(16, 16), True, ShapeError, "split halves need N1 = 2 I, got N1=64 and I=16"),
        (zeros(32, 16), zeros(32, 16), False, ShapeError, r"down\[0\] has shape \(32, 16\); needed: \(16, 16\)"),
        (zeros(16, 32), zeros(16, 16, dtype=np.float64), True, DTypeError, r"down\[0\] is float64, up\[0\] is float32"),
        (zeros(16, 32, dtype=np.int32), zeros(16, 16), True, DTypeError, r"up\[0\] is int32"),
    ],
)  # fmt: skip
def test_weights_border(up, down, transposed, error, message):
    with pytest.raises(error, match=message):
        gpu._check_source(WeightSource((up,), (down,), WeightLayout(transposed, True)))


def test_a_weight_off_the_boundary_is_refused():
    base = zeros(16 * 16 + 1)
    shifted = base[1:].reshape([16, 16])
    if shifted.data_ptr() % 16 == 0:
        pytest.skip("this framework copies slices")
    words = r"down\[0\] starts at 0x\w+; needed: a multiple of 16 bytes"
    with pytest.raises(LayoutError, match=words):
        gpu._check_source(WeightSource((zeros(16, 32),), (shifted,), WeightLayout(True, True)))
