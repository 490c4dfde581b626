"""The GPU quantisers against the reference, bit for bit: rows, weights in every layout, and the
guard that finds stale codes.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu.device import captured
from pairwise import pairwise

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.layouts import WeightLayout, deinterleave_gate_up
from sonicmoe.quant import gpu
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import quantize, transpose_storage
from sonicmoe.weight_source import WeightSource

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNWRITTEN = 0x55
HALVES = WeightLayout(transposed=True, split_half=True)
# (E, H, I): less than a tile, edges in both axes, whole tiles, public models' (GPT-OSS,
# Qwen3-30B-A3B, the reference shape)
SIZES = [
    (1, 16, 16),
    (3, 144, 80),
    (2, 256, 128),
    (4, 400, 208),
    (1, 272, 192),
    (2, 2880, 2880),
    (16, 2048, 768),
    (8, 3072, 1536),
]


@pytest.fixture(autouse=True)
def poisoned():
    with memory_full_of_nan("cuda"):
        yield


def values(shape, dtype, seed=0, special=True):
    """Rows of very different sizes, with zero blocks, denormals, huge values, NaN and infinity."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    x = (
        x * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), generator=generator, device="cuda"))
    ).to(dtype)
    if special and x.numel():
        flat, info = x.view(-1), torch.finfo(dtype)
        nan, inf = float("nan"), float("inf")
        for value in (nan, -nan, inf, -inf, info.tiny / 4, info.max, -info.max, -0.0):
            flat[torch.randint(0, flat.numel(), (2,), generator=generator, device="cuda")] = value
        flat[: min(256, flat.numel() // 2)] = 0.0
    return x


def assert_same(ours, wanted, label=""):
    assert ours.block == wanted.block and ours.orientation == wanted.orientation, label
    assert torch.equal(ours.bytes, wanted.bytes), label
    assert torch.equal(ours.scale_inv.view(torch.int32), wanted.scale_inv.view(torch.int32)), label


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_the_reference(self, dtype):
        for seed, (tokens, columns) in enumerate(
            itertools.product((1, 3, 129, 1000), (16, 112, 128, 144, 384, 2880, 3072, 7168))
        ):
            x = values((tokens, columns), dtype, seed)
            assert_same(gpu.quantize_rows(x), quantize(x, rows(128)), (tokens, columns))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_bit_pattern(self, dtype):
        """All 65536 of them, beside neighbours of like size and beside any other."""
        patterns = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
        shuffled = patterns[torch.randperm(2**16, device="cuda")]
        finite = patterns.view(dtype)[torch.isfinite(patterns.view(dtype))]
        for flat in (patterns.view(dtype), shuffled.view(dtype), finite):
            x = flat.reshape(-1, 128)
            assert_same(gpu.quantize_rows(x), quantize(x, rows(128)))

    @pytest.mark.parametrize("columns", [3072, 3088], ids=["whole blocks", "partial blocks"])
    @pytest.mark.large
    def test_past_two_to_the_31_elements(self, columns):
        repeats, tokens = 700, 1024
        pattern = values((tokens, columns), torch.bfloat16)
        x = pattern.repeat(repeats, 1)
        assert x.numel() > 2**31
        q, wanted = gpu.quantize_rows(x), quantize(pattern, rows(128))
        assert bool((q.bytes.view(repeats, tokens, -1) == wanted.bytes).all())
        scales = q.scale_inv.view(torch.int32).view(repeats, tokens, -1)
        assert bool((scales == wanted.scale_inv.view(torch.int32)).all())


def user_weights(sizes, dtype, transposed, split_half, seed=0, special=True):
    """A `WeightSource` of matrices at addresses that are odd multiples of 16 bytes, and a function
    for its native form.
    """
    experts, hidden, inner = sizes
    up = values((experts, 2 * inner, hidden), dtype, seed, special)
    down = values((experts, hidden, inner), dtype, seed + 1, special)
    if split_half:
        up = deinterleave_gate_up(up)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return WeightSource(scattered(up), scattered(down), WeightLayout(transposed, split_half))


def scattered(stacked):
    offset = 16 // stacked.element_size()
    places = []
    for matrix in stacked:
        room = torch.empty(matrix.numel() + 2 * offset, dtype=matrix.dtype, device="cuda")
        places.append(room[offset:-offset].view(matrix.shape).copy_(matrix))
        assert places[-1].data_ptr() % 32 == 16
    return tuple(places)


def check(weights, source, label=""):
    """Each order of each weight as the recipe quantises it."""
    recipe = RECIPES["dx256"]
    forward = zip((weights.w1, weights.w2), (recipe.w1, recipe.w2), strict=True)
    dgrad = zip(
        (weights.w1_dgrad, weights.w2_dgrad), (recipe.w1_dgrad, recipe.w2_dgrad), strict=True
    )
    for native, (ours, block), (turned, other) in zip(
        source.native()[:2], forward, dgrad, strict=True
    ):
        assert_same(ours, quantize(native, block), label)
        assert_same(turned, transpose_storage(quantize(native, other)), label)


def scribble(weights):
    """Spoil the codes, so that only a launch that quantises makes them right again."""
    weights.w1.bytes.fill_(UNWRITTEN)


def untouched(weights):
    return bool((weights.w1.bytes == UNWRITTEN).all())


class TestWeights:
    @pytest.mark.parametrize(
        ("dtype", "transposed", "split_half", "iso_weight"), pairwise(DTYPES, *[[False, True]] * 3)
    )
    def test_equals_the_reference(self, dtype, transposed, split_half, iso_weight):
        weights = gpu.QuantizedWeights(iso_weight)
        for seed, sizes in enumerate(SIZES):
            source = user_weights(sizes, dtype, transposed, split_half, seed)
            weights.update(source)
            check(weights, source, sizes)
        if iso_weight:
            held, nbytes = weights.w1, weights.nbytes
            weights.add_dgrad()
            weights.update(source)
            assert weights.w1 is held and weights.nbytes == 2 * nbytes
            check(weights, source, "both orders")

    @pytest.mark.large
    def test_past_two_to_the_31_elements(self):
        experts, hidden, inner = 17, 8192, 8192
        shapes = (experts, hidden, 2 * inner), (experts, inner, hidden)
        up, down = (
            torch.randint(-127, 127, shape, dtype=torch.int8, device="cuda").to(torch.bfloat16)
            for shape in shapes
        )
        assert up.numel() > 2**31
        weights = gpu.QuantizedWeights()
        weights.update(WeightSource(tuple(up), tuple(down), HALVES))
        for e in (0, 1, experts - 1):
            one = WeightSource((up[e],), (down[e],), HALVES)
            for native, block, forward, dgrad in zip(
                one.native()[:2],
                (gpu.W1_BLOCK, gpu.W2_BLOCK),
                (weights.w1, weights.w2),
                (weights.w1_dgrad, weights.w2_dgrad),
                strict=True,
            ):
                wanted = quantize(native[0], block)
                assert_same(forward[e], wanted, e)
                assert_same(dgrad[e], transpose_storage(wanted), e)


class TestGuard:
    @pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
    def source(self, request):
        return user_weights((8, 1024, 384), request.param, True, True, special=False)

    @pytest.fixture
    def weights(self, source):
        """Of the source; whatever does not quantise them anew leaves them spoilt."""
        made = gpu.QuantizedWeights()
        made.update(source)
        scribble(made)
        return made

    @pytest.fixture
    def moved(self, source):
        return WeightSource(source.up, (*source.down[:-1], source.down[-1].clone()), HALVES)

    @pytest.mark.parametrize("matrix", [0, 5, 8, 15])
    def test_a_change_of_one_matrix_is_seen(self, source, weights, matrix):
        changed = (*source.up, *source.down)[matrix]
        changed.add_(torch.randn(changed.shape, device="cuda").to(changed.dtype), alpha=1e-2)
        weights.update(source)
        check(weights, source)
        scribble(weights)
        weights.update(source)
        assert untouched(weights), "the flag was not cleared"

    def test_moved_weights_are_refused_in_a_capture(self, weights, moved):
        """And quantised outside, even to equal bytes: the old address may belong to somebody else."""
        with pytest.raises(Exception, match="have moved within a CUDA graph capture"):
            captured(lambda: weights.update(moved))
        weights.update(moved)
        check(weights, moved)

    def test_graph_follows_weight_updates(self, source, weights):
        graph, _ = captured(lambda: weights.update(source))
        for _ in range(3):
            scribble(weights)
            graph.replay()
            assert untouched(weights)
            for matrix in (*source.up, *source.down):
                matrix.mul_(-0.7)
            graph.replay()
            check(weights, source)
