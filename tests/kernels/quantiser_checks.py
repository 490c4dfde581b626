"""What the quantisers must give wherever their kernels run: codes and scales of the reference quantiser,
bit for bit, and a guard that finds stale codes.

A test file that imports these tests says where in a fixture `device`. On a host its kernels are those
of a GPU, compiled for the host: indices, edges and layouts are theirs, and rounding, NaN and infinity
are the host's.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from pairwise import pairwise

from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import gpu
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import quantize, transpose_storage
from sonicmoe.weight_source import WeightSource

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNWRITTEN = 0x55
LAYOUTS = [WeightLayout(*flags) for flags in itertools.product([False, True], repeat=2)]
APART = WeightLayout(split_half=True, apart=True)
HALVES = WeightLayout(transposed=True, split_half=True)
# (T, C), and (E, H, I): less than a block, edges in one axis and in both, whole blocks. N1 = 2I of
# 160, 256, 384 and 416: the last block of w1 has 160, 256, 128 and 160 rows.
ROWS = [(1, 16), (3, 128), (5, 144), (9, 272), (37, 384), (129, 112)]
SIZES = [(1, 16, 16), (3, 144, 80), (2, 256, 128), (2, 400, 208), (1, 272, 192)]


def values(shape, dtype, seed=0, device="cpu", special=True):
    """Rows of very different sizes, with zeros, denormals, huge values, NaN and infinity."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    powers = torch.randint(-12, 12, (*shape[:-1], 1), generator=generator, device=device)
    x = (x * torch.exp2(powers)).to(dtype)
    if special:
        flat, info = x.view(-1), torch.finfo(dtype)
        nan, inf = float("nan"), float("inf")
        for value in (nan, -nan, inf, -inf, info.tiny / 4, info.max, -info.max):
            flat[torch.randint(0, flat.numel(), (2,), generator=generator, device=device)] = value
        flat[: min(256, flat.numel() // 2)], flat[1] = 0.0, -0.0
    return x


def user_weights(sizes, dtype, layout, seed=0, device="cpu", special=True):
    """A `WeightSource` of matrices at addresses that are odd multiples of 16 bytes."""
    experts, hidden, inner = sizes
    up, down = (
        user(values((experts, *shape), dtype, seed + part, device, special)).contiguous()
        for part, (user, shape) in enumerate(
            ((layout.user_w1, (2 * inner, hidden)), (layout.user_w2, (hidden, inner)))
        )
    )
    if layout.apart:
        return WeightSource.stacked(up, down, layout=layout)
    return WeightSource(scattered(up), scattered(down), layout)


def scattered(stacked):
    offset = 16 // stacked.element_size()
    places = []
    for matrix in stacked:
        room = torch.empty(matrix.numel() + 2 * offset, dtype=matrix.dtype, device=matrix.device)
        places.append(room[offset:-offset].view(matrix.shape).copy_(matrix))
        assert places[-1].data_ptr() % 32 == 16
    return tuple(places)


def assert_same(ours, wanted, label=""):
    assert ours.block == wanted.block and ours.orientation == wanted.orientation, label
    assert torch.equal(ours.bytes, wanted.bytes), label
    assert torch.equal(ours.scale_inv.view(torch.int32), wanted.scale_inv.view(torch.int32)), label


def check(weights, source, label=""):
    """Each order of each weight as the recipe quantises it."""
    recipe = RECIPES["dx256"]
    for native, ours, turned, block, other in zip(
        source.native()[:2],
        (weights.w1, weights.w2),
        (weights.w1_dgrad, weights.w2_dgrad),
        (recipe.w1, recipe.w2),
        (recipe.w1_dgrad, recipe.w2_dgrad),
        strict=True,
    ):
        assert_same(ours, quantize(native, block), label)
        assert_same(turned, transpose_storage(quantize(native, other)), label)


def scribble(weights):
    """Spoil the codes, so that only a launch that quantises makes them right again."""
    weights.w1.bytes.fill_(UNWRITTEN)


def untouched(weights):
    return bool((weights.w1.bytes == UNWRITTEN).all())


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_equals_the_reference(self, device, dtype):
        for seed, shape in enumerate(ROWS):
            x = values(shape, dtype, seed, device)
            assert_same(gpu.quantize_rows(x), quantize(x, rows(128)), shape)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_bit_pattern(self, device, dtype):
        """All 65536 of them, beside neighbours of like size."""
        patterns = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
        for flat in (patterns, patterns[torch.isfinite(patterns)]):
            x = flat.reshape(-1, 128)
            assert_same(gpu.quantize_rows(x), quantize(x, rows(128)))


class TestWeights:
    @pytest.mark.parametrize(
        ("dtype", "layout", "iso_weight"),
        pairwise(DTYPES, [*LAYOUTS, APART], [False, True]),
        ids=str,
    )
    def test_equals_the_reference(self, device, dtype, layout, iso_weight):
        weights = gpu.QuantizedWeights(iso_weight)
        for seed, sizes in enumerate(SIZES):
            source = user_weights(sizes, dtype, layout, seed, device)
            weights.update(source)
            check(weights, source, sizes)
        if iso_weight:
            held, nbytes = weights.w1, weights.nbytes
            weights.add_dgrad()
            weights.update(source)
            assert weights.w1 is held and weights.nbytes == 2 * nbytes
            check(weights, source, "both orders")


class TestGuard:
    @pytest.fixture(params=[(torch.bfloat16, HALVES), (torch.float32, HALVES), (torch.bfloat16, APART)], ids=str)  # fmt: skip
    def source(self, device, request):
        sizes = (8, 1024, 384) if device == "cuda" else (2, 144, 80)
        return user_weights(sizes, *request.param, device=device, special=False)

    @pytest.fixture
    def weights(self, source):
        """Of the source; whatever does not quantise them anew leaves them spoilt."""
        made = gpu.QuantizedWeights()
        made.update(source)
        scribble(made)
        return made

    @pytest.mark.parametrize("matrix", ["first", "last of up", "first of down", "last"])
    def test_a_change_of_one_matrix_is_seen(self, source, weights, matrix):
        weights.update(source)
        assert untouched(weights), "nothing had changed"
        up = source.up if source.up_half is None else source.up_half
        places = {"first": source.up[0], "last of up": up[-1]}
        changed = (places | {"first of down": source.down[0], "last": source.down[-1]})[matrix]
        changed.add_(torch.randn_like(changed), alpha=1e-2)
        weights.update(source)
        check(weights, source)
        scribble(weights)
        weights.update(source)
        assert untouched(weights), "the flag was not cleared"
