"""FP8 operands of the weight gradients on the GPU against the exact quantiser on the host, bit for
bit.
"""

from __future__ import annotations

import pytest
import torch
from kernels.routing_cases import distinct_probs, sentinels, topk_of
from pairwise import pairwise

from sonicmoe.interop import current_stream
from sonicmoe.kernels.cuda_wgrad import wgrad_operands_source
from sonicmoe.quant.format import BlockScaledTensor, Orientation
from sonicmoe.quant.recipes import iso, rows
from sonicmoe.quant.reference import quantize, transpose_storage
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (T, C, experts here, K, experts everywhere): one tile, a partial last block, blocks of one octet
# pair, empty experts, a full grid, more tiles of an expert than experts, more experts than tiles of
# one
SHAPES = [
    (1, 128, 1, 1, 1),
    (257, 2064, 8, 3, 24),
    (64, 16, 16, 1, 16),
    (4096, 1536, 8, 8, 8),
    (5000, 144, 3, 2, 3),
    (2000, 384, 40, 8, 40),
]


def case(shape, dtype, seed=0):
    """Tokens and routing with the worst-case number of rows; tokens that nobody routes to are NaN."""
    tokens, width, experts, topk, everywhere = shape
    indices = sentinels(topk_of(tokens, topk, everywhere, seed), experts, seed % 3)
    routing = build_routing(indices.cuda(), distinct_probs(indices, experts).cuda(), experts)
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((tokens, width), generator=generator, device="cuda")
    x = x * torch.exp2(24 * torch.rand((tokens, 1), generator=generator, device="cuda") - 12)
    x[((indices < 0) | (indices >= experts)).all(1).cuda()] = float("nan")
    return x.to(dtype), routing


def assert_bits(got, want, routing):
    """Equal codes and scales of the rows that experts own."""
    assert got.orientation is Orientation.COLUMNS and got.shape[1] == want.shape[1]
    rows = int(routing.padded_offsets[-1])
    ours, golden = (q.bytes[:, :rows].cpu() for q in (got, want))
    assert torch.equal(ours, golden), f"{int((ours != golden).sum())} codes differ"
    ours, golden = (q.scale_inv[:, : rows // 128].cpu().view(torch.int32) for q in (got, want))
    assert torch.equal(ours, golden), f"{int((ours != golden).sum())} scales differ"


def launched(name, inputs, row_token, padded_offsets, outputs=1):
    """The outputs `[C, R]` that a kernel of the module writes into memory of 0xAB; the first of its inputs
    is `[.., C]`.
    """
    shape = (inputs[0].shape[1], len(row_token))
    outs = [
        BlockScaledTensor.empty(shape, iso(128), "cuda", orientation=Orientation.COLUMNS)
        for _ in range(outputs)
    ]
    flat = [tensor for out in outs for tensor in (out.bytes, out.scale_inv)]
    for tensor in flat:
        tensor.view(torch.uint8).fill_(0xAB)
    kernel = getattr(wgrad_operands_source("sm_90a").load(), name)
    kernel(*inputs, row_token, padded_offsets, *flat, current_stream(row_token))
    return outs


def gathered(x, routing):
    places = routing.row_token, routing.padded_offsets
    return launched("gather_transpose_quantize", [x], *places)[0]


def requantised(codes, scale, routing):
    places = routing.row_token, routing.padded_offsets
    return launched("gather_transpose_requantize", [codes, scale], *places)[0]


def on_host(x, row_token):
    """The same by the exact quantiser on the host; a row without a token is zeros, whatever tokens
    hold.
    """
    x, row_token = x.cpu().float(), row_token.cpu().long()
    real = (row_token >= 0) & (row_token < len(x))
    rows = torch.zeros(len(row_token), x.shape[1])
    rows[real] = x[row_token[real]]
    return transpose_storage(quantize(rows, iso(128)))


@pytest.mark.parametrize(("shape", "dtype"), pairwise(SHAPES, DTYPES))
def test_equals_the_reference(shape, dtype):
    x, routing = case(shape, dtype)
    assert_bits(gathered(x, routing), on_host(x, routing.row_token), routing)


def quantised_case(shape, seed=0):
    """Tokens as their sender quantised them, codes and scales of tokens without a slot NaN, and a
    routing for them.
    """
    x, routing = case(shape, torch.bfloat16, seed=seed)
    unused = torch.isnan(x).all(1)
    q = quantize(torch.where(unused.unsqueeze(1), 0, x).float(), rows(128))
    codes, scale = q.bytes, q.scale_inv
    codes[unused], scale[unused] = 0x7F, float("nan")
    return codes, scale, routing


def values_of(codes, scale):
    """fp32 products of codes and scales."""
    wide = scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.view(torch.float8_e4m3fn).float() * wide


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_quantised_again_like_their_values(shape):
    codes, scale, routing = quantised_case(shape)
    wanted = on_host(values_of(codes, scale), routing.row_token)
    assert_bits(requantised(codes, scale, routing), wanted, routing)


SPECIAL = (900, 400, 5, 2, 5)


def test_special_codes_and_scales():
    codes, scale, routing = quantised_case(SPECIAL, seed=3)
    generator = torch.Generator("cuda").manual_seed(1)
    draw = torch.rand(codes.shape, generator=generator, device="cuda")
    codes[:, :128] = torch.where(draw[:, :128] < 1e-3, 0x7F, codes[:, :128])
    codes[:, 256:300:7] = 0x80
    codes[:, 300:] &= 0x87  # subnormals of E4M3
    scale[::97, 1] = float("inf")
    scale[1::97, 1] = float("nan")
    scale[2::97, 2] = 1e-40
    wanted = on_host(values_of(codes, scale), routing.row_token)
    assert bool(torch.isinf(wanted.scale_inv).any())
    assert_bits(requantised(codes, scale, routing), wanted, routing)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    """NaN keeps its place, infinity makes its block NaN, zero blocks get codes 0, the smallest
    values are not flushed.
    """
    x, routing = case(SPECIAL, dtype, seed=3)
    generator = torch.Generator("cuda").manual_seed(1)
    draw = torch.rand(x.shape, generator=generator, device="cuda")
    x[:, :128] = torch.where(draw[:, :128] < 1e-3, float("nan"), x[:, :128])
    x[:100, 128:256] = torch.where(draw[:100, 128:256] < 1e-4, -float("inf"), x[:100, 128:256])
    x[:, 256:300] = 0.0
    x[:, 256:300:7] = -0.0
    tiny = 1e-40 if dtype is not torch.float16 else 6e-8
    x[:, 300:] = (draw[:, 300:] * 4 * tiny).to(dtype)
    want = on_host(x, routing.row_token)
    assert bool((want.bytes == 0x7F).any()) and bool(torch.isinf(want.scale_inv).any())
    assert_bits(gathered(x, routing), want, routing)


def test_pair_is_both():
    x, routing = case((700, 2880, 6, 4, 64), torch.bfloat16)
    given, places = [x, x.flip(0).contiguous()], (routing.row_token, routing.padded_offsets)
    pair = launched("gather_transpose_quantize_pair", given, *places, outputs=2)
    for got, source in zip(pair, given, strict=True):
        assert_bits(got, on_host(source, routing.row_token), routing)


def test_rows_behind_the_last_expert_stay_untouched_and_their_tokens_unread():
    x, routing = case((500, 272, 16, 4, 256), torch.bfloat16)
    used = int(routing.padded_offsets[-1])
    assert used < routing.num_rows
    row_token = routing.row_token.clone()
    row_token[used:] = 7
    (q,) = launched("gather_transpose_quantize", [x], row_token, routing.padded_offsets)
    for behind in (q.bytes[:, used:], q.scale_inv[:, used // 128 :]):
        assert bool((behind.contiguous().view(torch.uint8) == 0xAB).all())
    assert_bits(q, on_host(x, routing.row_token), routing)


@pytest.mark.large
def test_past_two_to_the_31_elements():
    tokens, width, rows = 4096, 4096, 128 * 4200
    assert rows * width > 2**31
    x = torch.randn((tokens, width), device="cuda").to(torch.bfloat16)
    row_token = torch.randint(-1, tokens, (rows,), dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, rows], device="cuda")
    (q,) = launched("gather_transpose_quantize", [x], row_token, offsets)
    for first in (0, 2**31 // width // 128 * 128, rows - 128):
        block = row_token[first : first + 128]
        want = on_host(x, block)
        assert torch.equal(q.bytes[:, first : first + 128].cpu(), want.bytes), first
        assert torch.equal(q.scale_inv[:, first // 128].cpu(), want.scale_inv[:, 0]), first
