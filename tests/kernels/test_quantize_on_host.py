"""The quantisers' CUDA kernels themselves, compiled for the host: what tests/gpu/test_quantize_gpu.py asks
of them on a GPU, and what only a host can see.
"""

from __future__ import annotations

import pytest
import torch
from kernels import host_cuda
from kernels.needs import HOST_MODULE
from kernels.quantiser_checks import (
    APART,
    LAYOUTS,
    UNWRITTEN,
    TestGuard,  # noqa: F401
    TestRows,  # noqa: F401
    TestWeights,  # noqa: F401
    scribble,
    untouched,
    user_weights,
    values,
)

from sonicmoe.kernels.cuda_quantize import quantize_source
from sonicmoe.quant import gpu
from sonicmoe.quant.format import scale_shape
from sonicmoe.quant.gpu import W1_BLOCK, W2_BLOCK
from sonicmoe.quant.reference import quantize, transpose_storage

pytestmark = HOST_MODULE


@pytest.fixture(scope="module")
def module(artefacts):
    return host_cuda.load("host_quantize", quantize_source("sm_90a").files, artefacts)


@pytest.fixture(autouse=True)
def device(module, monkeypatch):
    """Launches reach the host's kernels."""
    monkeypatch.setattr(gpu, "_kernels", lambda device: module)
    monkeypatch.setattr(gpu, "is_cuda", lambda tensor: True)
    return "cpu"


@pytest.mark.parametrize("block", [W1_BLOCK, W2_BLOCK], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 128, 128), (3, 144, 272), (1, 16, 400), (2, 400, 144), (2, 256, 128)], ids=str
)
def test_transposition(module, shape, block):
    q = quantize(values(shape, torch.float32), block)
    turned = shape[0], shape[2], shape[1]
    codes = torch.full(turned, UNWRITTEN, dtype=torch.uint8)
    scale_inv = torch.full(scale_shape(turned, block.transposed), float("nan"))
    module.transpose_bytes(q.bytes, q.scale_inv, codes, scale_inv, 0)
    wanted = transpose_storage(q)
    assert torch.equal(wanted.bytes, codes)
    assert torch.equal(wanted.scale_inv.view(torch.int32), scale_inv.view(torch.int32))


@pytest.mark.parametrize(("layout", "stripes"), [(LAYOUTS[0], [0, 1]), (APART, [0, 0])], ids=str)
def test_the_guard_reads_one_row_of_every_stripe(layout, stripes):
    """Each row touched alone: one row of each 128 (and one of the last, short stripe) shows; of gate
    and up in two tensors one of each.
    """
    source, weights = user_weights((1, 128, 80), torch.bfloat16, layout), gpu.QuantizedWeights()
    weights.update(source)
    seen = []
    for matrix in (*source.up, *(source.up_half or ())):
        for row in range(len(matrix)):
            scribble(weights)
            matrix[row] += 1
            weights.update(source)
            seen += [] if untouched(weights) else [row // 128]
    assert seen == stripes


def test_addresses_off_the_boundary_are_refused(module):
    with pytest.raises(Exception, match="weight 1 does not start on a 16-byte boundary"):
        module.store_addresses([4096, 4100], torch.zeros(2, dtype=torch.int64), 0)
