"""Routing metadata on the GPU against plain operations: bit for bit, whatever the memory held before."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from gpu.device import captured, waiting_is_an_error
from kernels.routing_cases import (
    PLAIN,
    assert_same,
    built_by,
    check_built,
    check_slot_values,
    check_sorted,
    corpus,
    distinct_probs,
    moved_by,
    sentinels,
    sorted_by,
    topk_of,
)

from sonicmoe.architectures import ARCHITECTURES
from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.kernels import routing_metadata_source
from sonicmoe.routing import backends
from sonicmoe.routing.build import build_routing, build_sorted_routing
from sonicmoe.routing.combine import scatter_to_slots

pytestmark = pytest.mark.gpu

# The automatic choice, grids of full and of partial tiles, of one CTA, of more CTAs than there are
# slots for; and Triton.
SHAPES = {"auto": 0, "grid132": 132, "grid40": 40, "grid7": 7, "grid1": 1}


def small_tiles():
    """The kernels as GPUs with 99 KB of shared memory in a block have them."""
    source = routing_metadata_source(backends.arch_of("cuda:0"))
    small = replace(source, defines=(("SHARED_KIB", ARCHITECTURES["sm_120a"].shared_kib),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "routing_metadata_source", lambda arch: small)
        return backends.CudaKernels(source.arch)


KERNELS = (*SHAPES, "small tiles", "triton")


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request):
    if request.param == "triton":
        return backends.TritonKernels()
    if request.param == "small tiles":
        return small_tiles()
    return backends.CudaKernels(backends.arch_of("cuda:0"), SHAPES[request.param])


@pytest.fixture
def poisoned():
    with memory_full_of_nan("cuda"):
        yield


@pytest.mark.parametrize(
    ("dtype", "counts_known"), [(torch.int32, False), (torch.int64, True)], ids=str
)
def test_corpus(kernels, dtype, counts_known, poisoned):
    for number, (name, indices, experts) in enumerate(corpus(scale=20)):
        if dtype == torch.int32 and name == "ids_past_32_bits":
            continue
        valid = indices[(indices >= 0) & (indices < experts)]
        counts = torch.bincount(valid, minlength=experts).tolist() if counts_known else None
        on_gpu = indices.to(dtype).cuda()
        check_built(kernels, on_gpu, experts, name, 128 << (number % 3), counts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_in_expert_order(kernels, dtype, poisoned):
    check_sorted(kernels, dtype, "cuda", scale=20)


@functools.cache
def large_case(name):
    """(indices on the GPU, num_experts), made once for all kernels."""
    generator = torch.Generator().manual_seed(len(name))
    if name == "all_on_one":
        indices, experts = torch.full((4_194_304, 1), 3), 8
    elif name == "all_on_each":
        indices, experts = torch.arange(8).expand(524_288, 8).contiguous(), 8
    elif name == "99_percent_invalid":
        rare = torch.rand(524_288, 8, generator=generator) < 0.01
        experts = 64
        anywhere = torch.randint(0, experts, rare.shape, generator=generator)
        indices = torch.where(rare, anywhere, -1)
    else:
        tokens, topk, experts = (int(part) for part in name.split("x"))
        local = torch.randint(0, experts + experts // 4 + 1, (tokens, topk), generator=generator)
        indices = sentinels(local, experts, 0)
    return indices.cuda(), experts


ALL_LARGE = (
    *("16384x8x8", "16384x8x512", "131072x8x32", "524288x8x8", "524288x8x128", "524288x8x512"),
    *("131072x32x64", "all_on_one", "all_on_each", "99_percent_invalid"),
)
MOST_USED = ("auto", "triton")


# The kernels that are chosen take every large batch; the other grids take them in turns.
@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        (kernel, name)
        for turn, kernel in enumerate(KERNELS)
        for index, name in enumerate(ALL_LARGE)
        if kernel in MOST_USED or index % len(KERNELS) == turn
    ],
    indirect=["kernels"],
)
def test_large(kernels, name, poisoned):
    check_built(kernels, *large_case(name), name)


def test_repeats_are_bit_equal(kernels):
    indices = topk_of(8192, 8, 64, 3).cuda()
    probs = torch.rand(8192, 8).cuda()
    first = built_by(kernels, indices, probs, 64)
    for _ in range(50):
        again = built_by(kernels, indices, probs, 64)
        assert all(torch.equal(a, b) for a, b in zip(first.tensors(), again.tensors(), strict=True))


def test_graph_replay_follows_its_inputs(kernels):
    indices, probs = torch.zeros((4096, 8), dtype=torch.int64).cuda(), torch.zeros(4096, 8).cuda()
    built_by(kernels, indices, probs, 48)
    graph, routing = captured(lambda: built_by(kernels, indices, probs, 48))
    for seed in range(3):
        fresh = sentinels(topk_of(4096, 8, 64, seed), 48, seed)
        indices.copy_(fresh)
        probs.copy_(distinct_probs(fresh, 48))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(routing, built_by(PLAIN, indices, probs, 48), seed)


def test_never_waits_for_the_gpu(kernels):
    indices, probs = topk_of(8192, 8, 16, 0).cuda(), torch.rand(8192, 8).cuda()
    built_by(kernels, indices, probs, 8)
    routing = build_routing(indices, probs, 8)
    scatter_to_slots(routing.row_prob, routing)
    counts = torch.full((8,), 1024, device="cuda")
    sorted_by(kernels, counts, None, 8192)
    with waiting_is_an_error():
        routing = built_by(kernels, indices, probs, 8)
        built_by(kernels, indices, probs, 8, [8192] * 8)
        sorted_by(kernels, counts, None, 8192)
        moved_by(kernels, routing.row_prob, routing.slot_row)
        scatter_to_slots(routing.row_prob, routing)
        build_routing(indices, probs, 8)


@triton.jit
def hold(word):
    """A program of this kernel holds its multiprocessor until the host has written the word."""
    seen = tl.load(word, volatile=True)
    while seen == 0:
        seen = tl.load(word, volatile=True)


def test_it_starts_beside_collectives():
    """A cooperative grid starts whole or not at all, and NCCL holds 24 multiprocessors."""
    kernels = backends.CudaKernels(backends.arch_of("cuda:0"))
    indices, probs = topk_of(65536, 8, 16, 0).cuda(), torch.rand(65536, 8).cuda()
    built_by(kernels, indices, probs, 8)
    word, done = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Event()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            hold[(24,)](word, num_warps=32)
        built_by(kernels, indices, probs, 8)
        done.record()
        deadline = time.monotonic() + 20
        while not done.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert done.query(), "the metadata waited for the kernel that held 24 multiprocessors"
    finally:
        word.fill_(1)


def test_slot_values(kernels, poisoned):
    for name, indices, experts in corpus(scale=20):
        check_slot_values(kernels, check_built(kernels, indices.cuda(), experts, name), name)


@pytest.mark.large
def test_slots_past_two_to_the_31():
    """Offsets of slots are 64-bit: 67 million tokens of 32 slots, of which three are routed."""
    tokens, topk = 2**26 + 5, 32
    indices = torch.full((tokens, topk), -1, dtype=torch.int32, device="cuda")
    probs = torch.empty((tokens, topk), device="cuda")
    places = [(0, 3, 1), (2**26 - 1, 31, 0), (2**26 + 4, 30, 1)]
    for token, slot, expert in places:
        indices[token, slot], probs[token, slot] = expert, token % 1000 + 0.5
    routing = build_routing(indices, probs, 2, [1, 2])
    assert routing.num_rows == 256
    rows = {0: 128, 1: 0, 2: 129}
    for number, (token, slot, _) in enumerate(places):
        row = rows[number]
        assert int(routing.slot_row[token, slot]) == row
        assert int(routing.row_token[row]) == token
        assert float(routing.row_prob[row]) == token % 1000 + 0.5
    assert int((routing.slot_row >= 0).sum()) == 3
    ds = scatter_to_slots(routing.row_prob, routing)
    assert float(ds[2**26 + 4, 30]) == (2**26 + 4) % 1000 + 0.5
    assert int((ds != 0).sum()) == 3


def test_one_launch():
    indices, probs = topk_of(8192, 8, 16, 0).cuda(), torch.rand(8192, 8).cuda()
    counts = torch.full((128,), 512, device="cuda")
    for build, kernel in (
        (partial(build_routing, indices, probs, 8), "build_metadata"),
        (partial(build_sorted_routing, counts, 65536), "place_sorted_rows"),
    ):
        build()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            build()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        launched = [event.name for event in profile.events() if event.device_type == on_gpu]
        assert len(launched) == 1 and kernel in launched[0], launched
