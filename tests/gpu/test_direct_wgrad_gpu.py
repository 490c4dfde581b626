"""Weight gradients added straight into the parameters' own memory, on the GPU: the bits of accumulating
and flushing, in every layout and arrangement, and not a byte beside the destinations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from gpu.device import captured
from gpu.engine_cases import FP8, E, K, make_case
from gpu.gradient_memory import LAYOUTS, Memory, added_to, ids
from pairwise import pairwise

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.gradient_places import WgradOutput
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType
from sonicmoe.interop import current_stream
from sonicmoe.kernels.sm90 import bf16_sources, fp8_wgrad_source
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import quantize, transpose_storage
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu

# (T, H, I, E, K): I an odd number of 64s, H no multiple of 128, one token, experts without tokens,
# more experts than one launch has maps for
SHAPES = [
    (700, 272, 320, 6, 3),
    (1, 144, 64, 5, 1),
    (1000, 400, 64, 40, 3),
    (1500, 272, 64, 260, 2),
]
ARRANGEMENTS = ("own", "slices", "some_frozen", "stacked_slices", "experts_inside_permuted")
DTYPES = {
    WgradOutput.ADD_F32: torch.float32, WgradOutput.WRITE_F32: torch.float32,
    WgradOutput.WRITE_BF16: torch.bfloat16,
}  # fmt: skip


def memory_of(shape, layout, arrangement, dtype=torch.float32):
    _, hidden, inner, experts, _ = shape
    return Memory((experts, 2 * inner, hidden, inner), layout, arrangement, dtype)


class Operands:
    """Token-major codes and scales of dz, x, dout and y1s, and the native gradients from them."""

    def __init__(self, shape):
        tokens, hidden, inner, experts, topk = shape
        generator = torch.Generator("cuda").manual_seed(0)
        scores = torch.rand((tokens, experts), generator=generator, device="cuda")
        scores[:, experts // 2] = -1.0
        probs = torch.rand((tokens, topk), generator=generator, device="cuda")
        self.routing = build_routing(scores.topk(topk, 1).indices, probs, experts)
        real = (self.routing.row_token >= 0).unsqueeze(1)

        def made(width, block):
            values = torch.randn(real.shape[0], width, generator=generator, device="cuda")
            stored = transpose_storage(quantize(torch.where(real, values, 0.0), block))
            return stored.codes, stored.scale_inv

        self.module, of = fp8_wgrad_source("sm_90a").load(), RECIPES[HOPPER.recipes[0]]
        self.left = made(2 * inner, of.wgrad_dz), made(hidden, of.wgrad_dout)
        self.right = made(hidden, of.wgrad_x), made(inner, of.wgrad_y1s)
        sizes = ((2 * inner, hidden), (hidden, inner))
        self.native = [torch.zeros((experts, m, n), device="cuda") for m, n in sizes]
        for left, right, sums in zip(self.left, self.right, self.native, strict=True):
            self.launch(left, right, added_to(self.module, sums))

    def launch(self, left, right, to, multiprocessors=0):
        stream = current_stream(left[0])
        offsets = self.routing.padded_offsets
        self.module.grouped_wgrad(*left, *right, offsets, to, multiprocessors, stream)

    def put(self, targets, multiprocessors, output):
        """As the passes do."""
        for weight, split, left, right in (
            (targets.up, targets.up.layout.split_half, self.left[0], self.right[0]),
            (targets.down, False, self.left[1], self.right[1]),
        ):
            places = [number for place in weight.places(split) for number in place]
            to = self.module.wgrad_destination(*weight.native_size, split, places, output)
            self.launch(left, right, to, multiprocessors)


operands = cache(Operands)  # of a shape


@pytest.mark.parametrize(
    ("shape", "arrangement", "layout", "output"),
    pairwise(SHAPES, ARRANGEMENTS, LAYOUTS, list(DTYPES)),
    ids=ids,
)
def test_the_bits_of_accumulating_and_flushing(layout, arrangement, shape, output):
    """Added, or written over whatever was there, rounded once and zeros for experts without tokens; again
    on an odd number of multiprocessors. All bytes around are as before.
    """
    given, dtype, over = operands(shape), DTYPES[output], output is not WgradOutput.ADD_F32
    memory = memory_of(shape, layout, arrangement, dtype)
    assert over or memory.targets.copy_engine_problem() is None
    for multiprocessors in (0, 37):
        given.put(memory.targets, multiprocessors, output)
        memory.take(*(sums.to(dtype) for sums in given.native), over=over)
    empty = (given.routing.expert_counts == 0).nonzero().flatten().tolist()
    assert empty and not any(sums[e].any() for sums in given.native for e in empty)
    assert all(sums.any() for sums in given.native)


ROWS = 1408  # of one expert: too many for its sums to be fetched, unless others have none


def fp8_addition(sums, offsets):
    codes = [
        torch.randint(0, 0x70, (size, ROWS), dtype=torch.uint8, device="cuda")
        for size in (256, 272)
    ]
    scales = [torch.rand((-(-len(c) // 128), ROWS // 128), device="cuda") for c in codes]
    left, right = zip(codes, scales, strict=True)
    module = fp8_wgrad_source("sm_90a").load()
    to = added_to(module, sums)
    return lambda: module.grouped_wgrad(*left, *right, offsets, to, 0, current_stream(sums))


def bf16_addition(sums, offsets, tokens_first=False):
    module = bf16_sources("sm_90a", ActivationType.SWIGLU)["bf16_wgrad"].load()
    _, m, n = sums.shape
    to = added_to(module, sums)
    width, hidden = (n, m) if tokens_first else (m, n)
    tokens, rows = (torch.randn(ROWS, c, device="cuda").bfloat16() for c in (hidden, width))
    row_token = torch.arange(ROWS, dtype=torch.int32, device="cuda")
    counts = (offsets[1:] - offsets[:-1]).int()
    given = tokens, rows, tokens_first, row_token, offsets, counts, to, 0, current_stream(sums)
    return lambda: module.wgrad(*given)


@pytest.mark.parametrize(
    "addition", [fp8_addition, bf16_addition, partial(bf16_addition, tokens_first=True)]
)
def test_fetched_sums_have_the_bits_of_the_copy_engines(addition):
    """Beside seven empty experts, experts have few rows on average."""
    before = torch.randn((8, 256, 272), device="cuda")
    before[0, 0, :8] = torch.tensor([1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, 0, -0.0, 1])
    every = []
    for experts in (1, 8):
        torch.manual_seed(0)
        sums = before[:experts].clone()
        offsets = torch.tensor([0, *[ROWS] * experts], device="cuda")
        add = addition(sums, offsets)
        add()
        add()
        every.append(sums)
    assert torch.equal(every[0][0].view(torch.int32), every[1][0].view(torch.int32))
    assert torch.equal(every[1][1:], before[1:]) and not torch.equal(every[0][0], before[0])


@pytest.mark.parametrize(
    ("engine", "settings", "layout", "arrangement"),
    [
        (HopperEngine(), FP8, LAYOUTS[3], "own"),
        (Bf16Engine(), EngineSettings(), LAYOUTS[0], "stacked_slices"),
    ],
    ids=["hopper", "bf16"],
)
def test_replays_of_a_graph_add_each_time(engine, settings, layout, arrangement):
    """Also after other memory was added to."""
    case = make_case(700, hidden=272, intermediate=320, seed=3)
    memory, other = (memory_of((700, 272, 320, E, K), layout, arrangement) for _ in range(2))
    weights, sums = engine.prepare_weights(*case.weights, settings), case.accumulators()
    _, saved = engine.forward(case.x, case.routing(), weights, settings)
    pending = engine.backward_dx(case.dout, saved, weights)[2]
    for targets in (sums, other.targets):  # loads the kernels
        engine.backward_dw(replace(pending), targets)
    assert sums.dw1.any() and sums.dw2.any()
    graph, _ = captured(lambda: engine.backward_dw(replace(pending), memory.targets))
    memory.check()  # a capture adds nothing
    engine.backward_dw(replace(pending), other.targets)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        memory.take(sums.dw1, sums.dw2)
