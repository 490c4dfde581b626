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
from kernels.test_quantize_on_host import LAYOUTS, UNWRITTEN, flags_of, user_matrices, values

from sonicmoe.engine.blackwell import mx
from sonicmoe.interop import dtype_name
from sonicmoe.kernels.blackwell import mx_quantize_source
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


def routing_of(counts, spare=0):
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
    return build_routing(ids, torch.rand(tokens, len(counts), generator=generator), len(counts))


def gathered(x, routing):
    rows = torch.zeros((routing.num_rows, x.shape[1]), dtype=torch.float32)
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


def unwritten(rows, width, down):
    """Codes, and both scale tensors with `down` rows of atoms."""
    across = -(-width // 128)
    shapes = (rows, width), (down, across, 512), (across, down, 512)
    return [torch.full(shape, UNWRITTEN, dtype=torch.uint8) for shape in shapes]


class TestKernels:
    pytestmark = HOST_MODULE

    @pytest.mark.parametrize(
        ("counts", "width"), [("spread", 144), ("one", 128), ("last is empty", 272)]
    )
    @pytest.mark.parametrize("gathers", [True, False])
    def test_rows(self, module, counts, width, gathers):
        routing = routing_of(COUNTS[counts])
        x = values((routing.num_tokens, width), torch.bfloat16)
        source = x
        if not gathers:  # what lies in padding rows must not matter
            source = gathered(x, routing).to(torch.bfloat16)
            source[routing.row_token < 0] = float("nan")
        rows, offsets = routing.num_rows, routing.padded_offsets
        down = mx.ragged_atoms(rows, len(COUNTS[counts]))
        _, along_columns, along_rows = made = unwritten(rows, width, down)
        module.quantize_rows_iso32(source, routing.row_token, offsets, *made, gathers, 0)
        found = mx.MxTensor.of(*made, padded_offsets=offsets)
        assert_rows(found, square(gathered(x, routing)), routing)
        unread = sorted({*range(down)} - {*mx.atom_of_tile(offsets, rows).tolist()})
        assert bool((along_columns[unread] == UNWRITTEN).all())
        assert bool((along_rows[:, unread] == UNWRITTEN).all())

    def test_rows_behind_the_last_expert_are_not_written(self, module):
        """A plan may have more rows than the experts need."""
        routing = routing_of(COUNTS["one"])
        x = values((routing.num_tokens, 128), torch.bfloat16)
        token = torch.cat([routing.row_token, torch.zeros(128, dtype=torch.int32)])
        codes, scales, _ = unwritten(256, 128, 2)
        module.quantize_rows_iso32(x, token, routing.padded_offsets, codes, scales, None, True, 0)
        assert bool((codes[128:] == UNWRITTEN).all()) and bool((scales[1] == UNWRITTEN).all())
        assert not bool((codes[:128] == UNWRITTEN).all())

    def test_every_bit_pattern(self, module):
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(512, 128)
        token = torch.arange(512, dtype=torch.int32)
        offsets = torch.tensor([0, 512])
        codes, scales, _ = unwritten(512, 128, 4)
        module.quantize_rows_iso32(x, token, offsets, codes, scales, None, True, 0)
        wanted = square(x)
        assert torch.equal(codes, wanted.codes.view(torch.uint8))
        assert torch.equal(scales, mx.scale_atoms(wanted)[0])

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_weights(self, module, dtype, layout):
        for experts, hidden, inner in ((2, 144, 80), (1, 256, 128)):
            shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
            native = [values(shape, dtype, seed) for seed, shape in enumerate(shapes, 1)]
            held, table = user_matrices(module, native, layout)
            outputs = [unwritten_weight(weight) for weight in native]
            flat = [tensor for output in outputs for tensor in output]
            state = torch.tensor([1, 0], dtype=torch.int32)
            flags = (*flags_of(layout), dtype_name(dtype), state)
            module.quantize_weights_iso32(table, *flat, *flags, False, 0)
            assert state.tolist() == [0, 0]
            for weight, (codes, along_columns, along_rows) in zip(native, outputs, strict=True):
                wanted = square(weight)
                assert torch.equal(codes, wanted.codes.view(torch.uint8))
                for found, atoms in zip(
                    (along_columns, along_rows), mx.scale_atoms(wanted), strict=True
                ):
                    live = mx.from_atoms(atoms) > 0  # no scale of a block has the byte 0
                    assert torch.equal(mx.from_atoms(found)[live], mx.from_atoms(atoms)[live])
            flat[0].fill_(UNWRITTEN)
            module.quantize_weights_iso32(table, *flat, *flags, False, 0)  # nothing changed
            assert bool((flat[0] == UNWRITTEN).all()) and held


def unwritten_weight(native):
    experts, rows, columns = native.shape
    made = unwritten(rows, columns, -(-rows // 128))
    return [tensor.expand(experts, *tensor.shape).contiguous() for tensor in made]
