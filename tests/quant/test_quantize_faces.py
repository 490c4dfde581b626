"""The faces of the GPU quantisers where no GPU is needed: host tensors, layouts, and what they
refuse.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch

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


def zeros(*shape, dtype=np.float32):
    return tensor(np.zeros(shape, dtype))
