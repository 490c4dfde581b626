"""MXFP8's quantisers on the device: codes and both blocked scale tensors equal the reference
quantiser bit for bit. No instruction of compute capability 10.0 is in them, so any GPU from 8.9 on
shows it.
"""

import pytest
import torch
from gpu.test_quantize_gpu import user_weights
from kernels.test_quantize_on_host import values as values_on_host
from pairwise import pairwise

from sonicmoe.engine.blackwell import mx
from sonicmoe.quant.recipes import ScaleFormat, iso
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu


def values(shape, dtype, seed=0):
    return values_on_host(shape, dtype, seed).cuda()


def assert_same(found, wanted):
    assert torch.equal(found.bytes, wanted.bytes)
    assert torch.equal(found.scale_inv.view(torch.int32), wanted.scale_inv.view(torch.int32))


def square(x):
    return quantize(x, iso(32), scale_format=ScaleFormat.POW2)


def random_routing(tokens, experts, topk, seed=0):
    """Expert 1 has no tokens; a third of the slots serves nobody."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand((tokens, experts), generator=generator, device="cuda").argsort(1)[:, :topk]
    drop = torch.rand((tokens, topk), generator=generator, device="cuda") < 0.3
    ids = torch.where(drop | (ids == 1), -1, ids)
    probs = torch.rand((tokens, topk), generator=generator, device="cuda")
    return build_routing(ids, probs, experts)


def gathered(x, routing):
    real = routing.row_token >= 0
    rows = torch.zeros((routing.num_rows, x.shape[1]), device="cuda")
    rows[real] = x[routing.row_token[real].long()].float()
    return rows


def assert_rows(found, wanted, routing):
    rows = int(routing.padded_offsets[-1])
    width, blocks = wanted.shape[1], -(-wanted.shape[1] // 32)
    assert torch.equal(found.bytes[:rows], wanted.bytes[:rows])
    atoms = mx.atom_of_tile(routing.padded_offsets, routing.num_rows)[: rows // 128]
    by_columns, by_rows = (mx.from_atoms(scales) for scales in mx.scale_atoms(wanted))
    held = mx.from_atoms(found.along_columns[atoms])
    assert torch.equal(held[:rows, :blocks], by_columns[:rows, :blocks])
    held = mx.from_atoms(found.along_rows[:, atoms].contiguous())
    assert torch.equal(held[:width], by_rows[:width, : rows // 32])


@pytest.mark.parametrize("width", [128, 144, 3072])
@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "in order"])
def test_rows(width, gathers):
    routing = random_routing(1000, 8, 4)
    x = values((1000, width), torch.bfloat16)
    wanted = square(gathered(x, routing))
    source = x
    if not gathers:
        source = gathered(x, routing).to(torch.bfloat16)
        source[routing.row_token < 0] = float("nan")  # must not matter
    places = routing.row_token, routing.padded_offsets
    found, again = (mx.quantize_rows_iso32(source, *places, gathers=gathers) for _ in range(2))
    assert_rows(found, wanted, routing)
    rows = int(routing.padded_offsets[-1])  # nobody writes those behind
    assert torch.equal(found.bytes[:rows], again.bytes[:rows])


@pytest.mark.parametrize(
    ("dtype", "transposed", "split_half"),
    pairwise([torch.bfloat16, torch.float16, torch.float32], *[[False, True]] * 2),
)
def test_weights(dtype, transposed, split_half):
    for sizes in ((3, 272, 80), (2, 512, 384)):
        source = user_weights(sizes, dtype, transposed, split_half)
        weights = mx.MxWeights()
        weights.update(source, force=True)
        for native, found in zip(source.native()[:2], (weights.w1, weights.w2), strict=True):
            wanted = square(native)
            assert_same(found, wanted)
            for scales, atoms in zip(
                (found.along_columns, found.along_rows), mx.scale_atoms(wanted), strict=True
            ):
                live = mx.from_atoms(atoms) > 0  # no scale of a block has the byte 0
                assert torch.equal(mx.from_atoms(scales)[live], mx.from_atoms(atoms)[live])
        assert weights.w1_dgrad is weights.w1 and weights.w2_dgrad is weights.w2
