"""MXFP8's quantisers: the CUDA kernels themselves, compiled for the host, against the reference
quantiser bit for bit.

Rounding, NaN and infinity are the GPU's own in tests/gpu/test_mx_quantize_gpu.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels import host_cuda
from kernels.needs import HOST_MODULE
from kernels.quantiser_checks import (
    APART,
    LAYOUTS,
    UNWRITTEN,
    assert_same,
    scribble,
    untouched,
    user_weights,
    values,
)

from sonicmoe.engine.blackwell import mx
from sonicmoe.kernels.blackwell import mx_quantize_source
from sonicmoe.quant import gpu
from sonicmoe.quant.recipes import ScaleFormat, iso
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.build import build_routing


def square(x):
    """The exact quantiser in 32x32 blocks with power-of-two scales."""
    return quantize(x, iso(32), scale_format=ScaleFormat.POW2)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (200, 9), (3, 256, 8)], ids=str)
def test_atoms_come_apart_again(shape):
    generator = torch.Generator().manual_seed(0)
    held = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    back = mx.from_atoms(mx.to_atoms(held))
    assert torch.equal(back[..., : shape[-2], : shape[-1]], held)
    assert not back[..., shape[-2] :, :].any() and not back[..., shape[-1] :].any()


def test_a_tile_of_square_blocks_repeats_sixteen_bytes():
    """On which the kernels rest: both atoms of a tile are 32 times the 4 x 4 scales, or their
    transpose.
    """
    q = square(values((1, 128, 128), torch.float32)[0])
    along_columns, along_rows = mx.scale_atoms(q)
    four = mx.to_bytes(q.scale_inv)
    assert torch.equal(along_columns.reshape(32, 4, 4), four.expand(32, 4, 4))
    assert torch.equal(along_rows.reshape(32, 4, 4), four.T.expand(32, 4, 4))


COUNTS = {"spread": [130, 0, 1, 128, 0], "one": [100], "last is empty": [5, 256, 0]}


def routing_of(counts, device="cpu"):
    """Rows of experts with these counts, of tokens in a mixed order."""
    generator = torch.Generator().manual_seed(1)
    tokens = max(counts) + 3
    triples = [
        (int(t), e)
        for e, n in enumerate(counts)
        for t in torch.randperm(tokens, generator=generator)[:n]
    ]
    ids = torch.full((tokens, len(counts)), -1, dtype=torch.int64)
    for token, expert in triples:
        ids[token, expert] = expert
    probs = torch.rand(tokens, len(counts), generator=generator)
    return build_routing(ids.to(device), probs.to(device), len(counts))


def gathered(x, routing):
    rows = torch.zeros((routing.num_rows, x.shape[1]), device=x.device)
    real = routing.row_token >= 0
    rows[real] = x[routing.row_token[real].long()].float()
    return rows


def test_experts_have_atoms_of_their_own():
    """The formula of the GEMMs (`VarlenManager.offset_batch_SFA`): expert e begins at offset / 128 +
    e.
    """
    routing = routing_of(COUNTS["spread"])
    starts = routing.padded_offsets.tolist()
    atoms = mx.atom_of_tile(routing.padded_offsets, routing.num_rows)
    wanted = []
    for expert, (first, end) in enumerate(itertools.pairwise(starts)):
        wanted += [first // 128 + expert + i for i in range((end - first) // 128)]
    assert atoms.tolist() == wanted
    assert max(wanted) < mx.ragged_atoms(routing.num_rows, len(COUNTS["spread"]))


def assert_rows(found, wanted, routing):
    """Codes, scales as they are read, and both scale tensors byte for byte."""
    rows = int(routing.padded_offsets[-1])
    assert torch.equal(found.bytes[:rows], wanted.codes.view(torch.uint8)[:rows])
    blocks = rows // 32
    for along in ("along_columns", "along_rows"):
        one = {"along_columns": None, "along_rows": None} | {along: getattr(found, along)}
        read = mx.MxTensor.of(found.bytes, **one, padded_offsets=routing.padded_offsets)
        got, scales = (q.scale_inv[:blocks].view(torch.int32) for q in (read, wanted))
        assert torch.equal(got, scales), along
    atoms = mx.atom_of_tile(routing.padded_offsets, routing.num_rows)[: rows // 128]
    by_columns, by_rows = mx.scale_atoms(wanted)
    width = wanted.shape[1]
    # Every row of the matrix; behind its last column an atom holds what nobody reads.
    live = slice(0, -(-width // 32))
    held = mx.from_atoms(found.along_columns[atoms])[:, live]
    assert torch.equal(held[:rows], mx.from_atoms(by_columns)[:rows, live])
    held = mx.from_atoms(found.along_rows[:, atoms])[:width]
    assert torch.equal(held, mx.from_atoms(by_rows)[:width, : rows // 32])


@pytest.fixture(scope="module")
def module(artefacts):
    return host_cuda.load("host_mx", mx_quantize_source("sm_90a").files, artefacts)


@pytest.fixture
def device(module, monkeypatch):
    """Launches reach the host's kernels; every byte that they do not write is `UNWRITTEN`."""
    monkeypatch.setattr(mx, "_kernels", lambda device: module)
    empty = mx.empty
    monkeypatch.setattr(gpu, "is_cuda", lambda tensor: True)
    monkeypatch.setattr(mx, "empty", lambda *of: empty(*of).fill_(UNWRITTEN))
    return "cpu"


class TestRows:
    pytestmark = HOST_MODULE

    @pytest.mark.parametrize(
        ("counts", "width"), [("spread", 144), ("one", 128), ("last is empty", 272)]
    )
    @pytest.mark.parametrize("gathers", [True, False])
    def test_equals_the_reference(self, device, counts, width, gathers):
        routing = routing_of(COUNTS[counts], device)
        x = values((routing.num_tokens, width), torch.bfloat16, device=device)
        source = x
        if not gathers:  # what lies in padding rows must not matter
            source = gathered(x, routing).to(torch.bfloat16)
            source[routing.row_token < 0] = float("nan")
        places = routing.row_token, routing.padded_offsets
        found = mx.quantize_rows_iso32(source, *places, gathers=gathers)
        assert_rows(found, square(gathered(x, routing)), routing)

    def test_every_bit_pattern(self, device):
        patterns = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
        x = patterns.view(torch.bfloat16).reshape(512, 128)
        token = torch.arange(512, dtype=torch.int32, device=device)
        offsets = torch.tensor([0, 512], device=device)
        found, wanted = mx.quantize_rows_iso32(x, token, offsets, gathers=True), square(x)
        assert torch.equal(found.bytes, wanted.bytes)
        assert torch.equal(found.along_columns[:4], mx.scale_atoms(wanted)[0])


class TestWeights:
    pytestmark = HOST_MODULE

    @pytest.mark.parametrize("layout", [*LAYOUTS, APART], ids=str)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_equals_the_reference(self, device, dtype, layout):
        for sizes in ((2, 144, 80), (1, 256, 128)):
            source, weights = user_weights(sizes, dtype, layout, 0, device), mx.MxWeights()
            weights.update(source)
            for native, found in zip(source.native()[:2], (weights.w1, weights.w2), strict=True):
                wanted = square(native)
                assert_same(found, wanted)
                for scales, atoms in zip(
                    (found.along_columns, found.along_rows), mx.scale_atoms(wanted), strict=True
                ):
                    live = mx.from_atoms(atoms) > 0  # no scale of a block has the byte 0
                    assert torch.equal(mx.from_atoms(scales)[live], mx.from_atoms(atoms)[live])
            assert weights.w1_dgrad is weights.w1 and weights.w2_dgrad is weights.w2
            scribble(weights)
            weights.update(source)
            assert untouched(weights), "nothing had changed"


class TestWhatIsNotWritten:
    pytestmark = HOST_MODULE

    def test_atoms_of_no_tile(self, device):
        routing = routing_of(COUNTS["spread"])
        x = values((routing.num_tokens, 144), torch.bfloat16)
        places = routing.row_token, routing.padded_offsets
        found = mx.quantize_rows_iso32(x, *places, gathers=True)
        down = mx.ragged_atoms(routing.num_rows, len(COUNTS["spread"]))
        used = mx.atom_of_tile(routing.padded_offsets, routing.num_rows).tolist()
        unread = sorted({*range(down)} - {*used})
        assert unread and bool((found.along_columns[unread] == UNWRITTEN).all())
        assert bool((found.along_rows[:, unread] == UNWRITTEN).all())

    def test_rows_behind_the_last_expert(self, device):
        """A plan may have more rows than the experts need."""
        routing = routing_of(COUNTS["one"])
        x = values((routing.num_tokens, 128), torch.bfloat16)
        token = torch.cat([routing.row_token, torch.zeros(128, dtype=torch.int32)])
        found = mx.quantize_rows_iso32(x, token, routing.padded_offsets, gathers=True)
        assert bool((found.bytes[128:] == UNWRITTEN).all())
        assert bool((found.along_columns[1] == UNWRITTEN).all())
        assert not bool((found.bytes[:128] == UNWRITTEN).all())
