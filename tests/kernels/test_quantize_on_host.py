"""The quantisers' CUDA kernels themselves, compiled for the host, against the reference quantiser
bit for bit.

Proves indices, edges, layouts and the guard; rounding, NaN and infinity are the GPU's own in
tests/gpu/test_quantize_gpu.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels import host_cuda
from kernels.needs import HOST_MODULE

from sonicmoe.interop import dtype_name
from sonicmoe.kernels.cuda_quantize import quantize_source
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import gpu
from sonicmoe.quant.format import scale_shape
from sonicmoe.quant.gpu import W1_BLOCK, W2_BLOCK
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize, transpose_storage
from sonicmoe.weight_source import WeightSource

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNWRITTEN = 0x55
BLOCKS = W1_BLOCK, W2_BLOCK

pytestmark = HOST_MODULE


@pytest.fixture(scope="module")
def module(artefacts):
    return host_cuda.load("host_quantize", quantize_source("sm_90a").files, artefacts)


def values(shape, dtype, seed=0):
    """Rows of very different sizes, with zeros, denormals, NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = (x * torch.exp2(torch.randint(-12, 12, (shape[-2], 1), generator=generator))).to(dtype)
    flat = x.view(-1)
    for special in (float("nan"), float("inf"), torch.finfo(dtype).tiny / 4):
        flat[torch.randint(0, flat.numel(), (3,), generator=generator)] = special
    flat[:16], flat[1] = 0.0, -0.0
    return x


def unwritten(shape, block):
    """Codes and scales of matrices that are stored in such blocks."""
    scales = torch.full(scale_shape(shape, block), float("nan"))
    return torch.full(shape, UNWRITTEN, dtype=torch.uint8), scales


def assert_same(q, codes, scale_inv, label=""):
    assert torch.equal(q.codes.view(torch.uint8), codes), label
    assert torch.equal(q.scale_inv.view(torch.int32), scale_inv.view(torch.int32)), label


def assert_rows(quantiser, x, block):
    """What a kernel writes for rows is what the reference quantiser gives."""
    codes = torch.full(tuple(x.shape), UNWRITTEN, dtype=torch.uint8)
    scale_inv = torch.full((x.shape[0], -(-x.shape[1] // 128)), -1.0)
    quantiser(x, codes, scale_inv, 0)
    assert_same(quantize(x, block), codes, scale_inv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 128), (1, 16), (5, 144), (37, 384), (9, 272)], ids=str)
def test_rows(module, dtype, shape):
    assert_rows(module.quantize_rows, values(shape, dtype), rows(128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_bit_pattern(module, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(-1, 128)
    assert_rows(module.quantize_rows, x, rows(128))


@pytest.mark.parametrize("block", [W1_BLOCK, W2_BLOCK], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 128, 128), (3, 144, 272), (1, 16, 400), (2, 400, 144), (2, 256, 128)], ids=str
)
def test_transposition(module, shape, block):
    q = quantize(values(shape, torch.float32), block)
    codes, scale_inv = unwritten((shape[0], shape[2], shape[1]), block.transposed)
    module.transpose_bytes(q.codes.view(torch.uint8), q.scale_inv, codes, scale_inv, 0)
    assert_same(transpose_storage(q), codes, scale_inv)


def user_matrices(module, stacked, layout):
    """The user's matrices of native w1 and w2, and the table of their addresses."""
    up, down = layout.user_w1(stacked[0]), layout.user_w2(stacked[1])
    up = up.flatten(0, 1) if layout.apart else up
    matrices = [matrix.clone() for one in (up, down) for matrix in one]
    table = torch.zeros(len(matrices), dtype=torch.int64)
    module.store_addresses([matrix.data_ptr() for matrix in matrices], table, 0)
    return matrices, table


def flags_of(layout):
    return layout.transposed, layout.split_half, layout.apart


class Weights:
    """Native weights, the user's matrices made of them, and everything a launch needs.

    both: dgrad's order is wanted too.
    """

    def __init__(self, module, dtype, layout, sizes, both=True):
        experts, hidden, inner = sizes
        self.module, self.n1 = module, 2 * inner
        shapes = (experts, self.n1, hidden), (experts, hidden, inner)
        self.native = [values(shape, dtype, seed) for seed, shape in enumerate(shapes, 1)]
        matrices = user_matrices(module, self.native, layout)
        self.matrices, self.table = matrices
        self.forward = list(map(unwritten, shapes, BLOCKS))
        turned = ((e, columns, rows) for e, rows, columns in shapes)
        dgrad = map(unwritten, turned, (block.transposed for block in BLOCKS))
        self.dgrad = list(dgrad) if both else [(None, None)] * 2
        self.state = torch.zeros(2, dtype=torch.int32)
        element = dtype_name(dtype)
        self.where = self.table, self.n1, hidden, inner, layout.transposed, layout.apart, element
        self.flags = *flags_of(layout), element
        count = int(module.num_checksums(*self.where))
        self.checksums = torch.full((count,), -1, dtype=torch.int32)

    def check_guard(self):
        """Whether the guard sees a change."""
        self.module.check_weights(*self.where, self.checksums, self.state, 0)
        return bool(self.state[0])

    def update(self, force):
        """Whether the guard saw a change."""
        changed = self.check_guard()
        outputs = [tensor for pair in (*self.forward, *self.dgrad) for tensor in pair]
        self.module.quantize_weights(self.table, *outputs, *self.flags, self.state, force, 0)
        assert self.state.tolist() == [0, 0]
        return changed

    def check(self):
        for native, block, forward in zip(self.native, BLOCKS, self.forward, strict=True):
            assert_same(quantize(native, block), *forward)
        for native, block, dgrad in zip(self.native, BLOCKS, self.dgrad, strict=True):
            if dgrad[0] is not None:
                assert_same(transpose_storage(quantize(native, block)), *dgrad)


LAYOUTS = [WeightLayout(*flags) for flags in itertools.product([False, True], repeat=2)]
LAYOUTS.append(WeightLayout(split_half=True, apart=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights(module, dtype, layout):
    # N1 of 160, 256, 384 and 416: the last block of w1 has 160, 256, 128 and 160 rows.
    for sizes, both in (
        ((2, 144, 80), True),
        ((1, 256, 128), False),
        ((1, 272, 192), True),
        ((2, 400, 208), True),
    ):
        weights = Weights(module, dtype, layout, sizes, both)
        weights.update(force=True)
        weights.check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layers_codes_follow_every_tensor(module, layout, monkeypatch):
    """Through the class that launches the kernels, without an announcement."""
    monkeypatch.setattr(gpu, "_kernels", lambda device: module)
    monkeypatch.setattr(gpu, "is_cuda", lambda tensor: True)
    native = [values(shape, torch.bfloat16, 1) for shape in ((2, 160, 144), (2, 144, 80))]
    w1, w2 = layout.user_w1(native[0]).clone(), layout.user_w2(native[1]).clone()
    source, weights = WeightSource.stacked(w1, w2, layout=layout), gpu.QuantizedWeights()
    for written in (w2[:0], *w1, w2):
        written.neg_()
        weights.update(source)
        for one, found in zip(source.native()[:2], (weights.w1, weights.w2), strict=True):
            assert_same(quantize(one, found.block), found.bytes, found.scale_inv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_guard(module, dtype):
    weights = Weights(module, dtype, WeightLayout(True, True), (2, 144, 80))
    weights.update(force=True)
    scribbled = weights.forward[0][0]
    scribbled.fill_(UNWRITTEN)
    assert not weights.update(force=False) and bool((scribbled == UNWRITTEN).all())
    assert not weights.update(force=True)
    weights.check()
    scribbled.fill_(UNWRITTEN)
    weights.matrices[-1].neg_()
    weights.native[1][-1].neg_()
    assert weights.update(force=False)
    weights.check()
    assert not weights.update(force=False)


@pytest.mark.parametrize(("layout", "stripes"), [(LAYOUTS[0], [0, 1]), (LAYOUTS[-1], [0, 0])])
def test_guard_reads_one_row_of_every_stripe(module, layout, stripes):
    """Each row touched alone: one row of each 128 (and one of the last, short stripe) shows; of gate
    and up in two tensors one of each.
    """
    weights = Weights(module, torch.bfloat16, layout, (1, 128, 80))
    weights.update(force=True)
    seen = []
    for matrix in weights.matrices[:-1]:
        for row in range(len(matrix)):
            matrix[row] += 1
            if weights.check_guard():
                seen.append(row // 128)
                weights.state.zero_()
    assert seen == stripes


def test_addresses_off_the_boundary_are_refused(module):
    with pytest.raises(Exception, match="weight 1 does not start on a 16-byte boundary"):
        module.store_addresses([4096, 4100], torch.zeros(2, dtype=torch.int64), 0)
