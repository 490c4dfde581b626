"""Routing metadata, and sums over the slots of a token, on the GPU against plain operations: bit for bit,
whatever the memory held before.
"""

from __future__ import annotations

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
    check_sums,
    corpus,
    distinct_probs,
    moved_by,
    sentinels,
    sorted_by,
    summed_by,
    topk_of,
)

from sonicmoe.architectures import ARCHITECTURES
from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.kernels import routing_metadata_source
from sonicmoe.routing import backends
from sonicmoe.routing.build import build_routing, build_sorted_routing, num_rows_bound
from sonicmoe.routing.combine import scatter_to_slots

pytestmark = pytest.mark.gpu

# The automatic choice, grids of full and of partial tiles, and of one CTA.
SHAPES = {"auto": 0, "grid132": 132, "grid7": 7, "grid1": 1}


def small_tiles():
    """The kernels as GPUs with 99 KB of shared memory in a block have them."""
    source = routing_metadata_source(backends.arch_of("cuda:0"))
    small = replace(source, defines=(("SHARED_KIB", ARCHITECTURES["sm_120a"].shared_kib),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "routing_metadata_source", lambda arch: small)
        return backends.CudaKernels(source.arch)


@pytest.fixture(scope="module", params=(*SHAPES, "small tiles", "triton"))
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
        routing = check_built(kernels, on_gpu, experts, name, 128 << (number % 3), counts)
        check_slot_values(kernels, routing, name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_in_expert_order(kernels, dtype, poisoned):
    check_sorted(kernels, dtype, "cuda", scale=20)


# T, K and experts of large batches; or ids that all name one expert, or every one.
LARGE = ((131072, 8, 32), (524288, 8, 512), (131072, 32, 64), "all on one", "all on each")


def test_large(kernels, poisoned):
    for name in LARGE:
        if name == "all on one":
            indices, experts = torch.full((4_194_304, 1), 3), 8
        elif name == "all on each":
            indices, experts = torch.arange(8).expand(524_288, 8).contiguous(), 8
        else:
            tokens, topk, experts = name
            generator = torch.Generator().manual_seed(experts)
            local = (0, experts + experts // 4 + 1, (tokens, topk))
            indices = sentinels(torch.randint(*local, generator=generator), experts, 0)
        check_built(kernels, indices.cuda(), experts, name)


def test_repeats_are_bit_equal(kernels):
    indices, probs = topk_of(8192, 8, 64, 3).cuda(), torch.rand(8192, 8).cuda()
    first = built_by(kernels, indices, probs, 64)
    for _ in range(50):
        assert_same(built_by(kernels, indices, probs, 64), first, "again")


def test_graph_replay_follows_its_inputs(kernels):
    indices, probs = torch.zeros((4096, 8), dtype=torch.int64).cuda(), torch.zeros(4096, 8).cuda()
    rows = torch.randn((num_rows_bound(4096 * 8, 48, 128), 1024), device="cuda")

    def step():
        routing = built_by(kernels, indices, probs, 48)
        return routing, summed_by(kernels, rows, routing, weighted=True)

    step()
    with waiting_is_an_error():
        graph, (routing, sums) = captured(step)
    for seed in range(3):
        fresh = sentinels(topk_of(4096, 8, 64, seed), 48, seed)
        indices.copy_(fresh)
        probs.copy_(distinct_probs(fresh, 48))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(routing, built_by(PLAIN, indices, probs, 48), seed)
        assert torch.equal(sums, summed_by(PLAIN, rows, routing, weighted=True))


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


class TestSums:
    @pytest.fixture(params=["cuda", "triton"])
    def kernels(self, request):
        if request.param == "triton":
            return backends.TritonKernels()
        return backends.CudaKernels(backends.arch_of("cuda:0"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_equal_plain_operations(self, kernels, dtype, poisoned):
        for seed, (tokens, topk, everywhere) in enumerate(
            [(1, 1, 4), (257, 8, 16), (100, 32, 40), (64, 33, 48), (500, 8, 256)]
        ):
            experts = min(16, everywhere)
            indices = sentinels(topk_of(tokens, topk, everywhere, seed), experts, seed % 3)
            probs = distinct_probs(indices, experts)
            routing = build_routing(indices.cuda(), probs.cuda(), experts)
            for width in (1, 7, 20, 256, 1000, 3072, 4104):
                for weighted in (False, True):
                    check_sums(kernels, routing, width, dtype, weighted)
            check_sums(kernels, routing, 20, dtype, True, torch.float32)

    @pytest.mark.large
    def test_rows_past_two_to_the_31_elements(self, kernels):
        tokens, width = 900_000, 2560
        indices = torch.arange(tokens, device="cuda").remainder(2).reshape(-1, 1)
        probs, half = torch.ones((tokens, 1), device="cuda"), tokens // 2
        routing = build_routing(indices, probs, 2, [half, half])
        assert routing.num_rows * width > 2**31
        rows = torch.randint(-9, 9, (routing.num_rows, 1), device="cuda").to(torch.bfloat16)
        out = summed_by(kernels, rows.expand(-1, width).contiguous(), routing, weighted=False)
        assert bool((out == rows[routing.slot_row[:, 0]]).all())
