"""Weight gradients of the BF16 GEMMs added straight into stacked parameters' memory, on the GPU: the
bits of accumulating and flushing in every layout and arrangement, and not a byte beside them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from gpu.device import fill_free_memory, raw
from gpu.engine_cases import ARCH, FP8, REFERENCE, SWIGLU, build, make_case, relative
from gpu.gradient_memory import LAYOUTS, Memory, ids
from pairwise import pairwise

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.targets import ParameterTargets
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.errors import ConfigError
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.quack_gemm import (
    STORED,
    MlpShape,
    all_kernels,
    candidates,
    expert_rows_source,
    grouped_gemms,
    wgrad_down_kernel,
    wgrad_up_kernel,
)
from sonicmoe.kernels.quack_tilings import FAMILIES, served_by
from sonicmoe.kernels.sm90 import engine_sources
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

GELU = ActivationType.GELU
OURS = Bf16Engine()
CLASSES = ("sm90", "sm120")
# (T, H, I, E, K): tiles end inside of I and of H, I is an odd multiple of 8, one expert, many
SHAPES = [(700, 512, 384, 6, 3), (300, 264, 200, 4, 2), (130, 2880, 72, 1, 1), (600, 128, 136, 130, 4)]  # fmt: skip
ARRANGEMENTS = ("stacked", "stacked_slices", "padded", "stacked_permuted", "experts_inside")


def tilings(family):
    """As this GPU runs them: without cluster launch control."""
    shape = MlpShape(512, 384, SWIGLU, arch=ARCH, family=family)
    return [config for config, _ in candidates("wgrad_up", shape)]


@pytest.fixture(scope="module", params=CLASSES, autouse=True)
def family(request):
    """Whose GEMM class adds: that of this GPU's family, and that for sm120."""
    with served_by(ARCH, request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def compiled(family):
    """What a warm-up of these shapes compiles, and the forced tilings; nothing else may compile."""
    sizes = {(h, i) for _, h, i, _, _ in SHAPES}
    shapes = [MlpShape(h, i, kind, arch=ARCH) for h, i in sizes for kind in (SWIGLU, GELU)]
    shapes.append(MlpShape(512, 384, SWIGLU, "float16", arch=ARCH))
    jobs = [*cuda_sources(ARCH), expert_rows_source(ARCH), *engine_sources(ARCH, SWIGLU)]
    jobs += [kernel for shape in shapes for kernel in all_kernels(shape)]
    for config in tilings(family):
        jobs += [wgrad_down_kernel(shapes[0], config, stored) for stored in STORED["wgrad_down"]]
        jobs += [wgrad_up_kernel(shapes[0], config, stored) for stored in STORED["wgrad_up"]]
    build(jobs)
    with no_compile():
        yield


def case_of(shape=SHAPES[0], *, activation=SWIGLU, seed=0, dtype=torch.bfloat16):
    tokens, hidden, inner, experts, topk = shape
    return make_case(
        tokens, hidden=hidden, intermediate=inner, experts=experts, topk=topk, seed=seed,
        activation=activation, dtype=dtype, empty=(experts // 2,) if experts > 1 else (),
    )  # fmt: skip


def sizes_of(case):
    return (*case.weights[0].shape, int(case.weights[1].shape[2]))


def memory_of(case, layout, arrangement):
    experts, n1, hidden, inner = sizes_of(case)
    return Memory((experts, n1, hidden, inner), layout, arrangement)


def problem_of(memory):
    assert memory.targets.problem(*memory.native, "cuda:0") is None
    return OURS.problem_of(memory.targets, EngineSettings())


def pending_of(case, settings=None, engine=OURS):
    settings = settings or EngineSettings(activation=case.activation)
    weights = engine.prepare_weights(*case.weights, settings)
    _, saved = engine.forward(case.x, case.routing(), weights, settings)
    return engine.backward_dx(case.dout, saved, weights)[2]


def native(case, pending, engine=OURS):
    experts, n1, hidden, inner = sizes_of(case)
    sums = NativeBuffer.zeros(experts, n1, hidden, inner, False, "cuda")
    engine.backward_dw(replace(pending), sums)
    assert sums.dw1.any() and sums.dw2.any()
    return sums.dw1, sums.dw2


def check_addition(case, memory, settings=None, engine=OURS):
    """One backward adds what accumulating and flushing would."""
    pending = pending_of(case, settings, engine)
    gradients = native(case, pending, engine)
    fill_free_memory(0xFF)
    engine.backward_dw(pending, memory.targets)
    assert not memory.targets.adding and pending.dz is None
    memory.take(*gradients)


def fits(layout, arrangement):
    """Where gate and up columns lie apart, H must be the contiguous axis."""
    return not layout.split_half or (arrangement == "stacked_permuted") == layout.transposed


@pytest.mark.parametrize(
    ("shape", "arrangement", "layout", "activation"),
    pairwise(SHAPES, ARRANGEMENTS, LAYOUTS, [SWIGLU, GELU]),
    ids=ids,
)
def test_the_bits_of_accumulating_and_flushing(activation, layout, arrangement, shape):
    """Of two micro-batches; all bytes around are as before, also of experts without tokens."""
    if not is_glu(activation):
        layout = WeightLayout(layout.transposed, False)
    memory = memory_of(case_of(shape, activation=activation), layout, arrangement)
    assert (problem_of(memory) is None) == fits(layout, arrangement)
    if fits(layout, arrangement):
        for seed in (0, 1):
            check_addition(case_of(shape, activation=activation, seed=seed), memory)


FITTING = [
    pair for pair in itertools.product(LAYOUTS, ("padded", "stacked_permuted")) if fits(*pair)
]


@pytest.mark.parametrize(
    ("family", "config", "layout", "arrangement"),
    [
        (family, config, *FITTING[(index + turn) % len(FITTING)])
        for family in CLASSES
        for index, config in enumerate(tilings(family))
        for turn in (0, 1)
    ],
    indirect=["family"],
    ids=ids,
)
def test_every_tiling(layout, arrangement, family, config, monkeypatch):
    for product in ("wgrad_down", "wgrad_up"):
        monkeypatch.setitem(FAMILIES[family].candidates, product, ((config, 1.0),))
    grouped_gemms.cache_clear()
    try:
        case = case_of(SHAPES[1])
        check_addition(case, memory_of(case, layout, arrangement))
    finally:
        grouped_gemms.cache_clear()


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=ids)
def test_what_the_reference_engine_adds(layout):
    """So that no mistake can hide in what both paths of this engine share."""
    case, found = case_of(), []
    for engine in (OURS, REFERENCE):
        memory = memory_of(case, layout, "stacked_slices")
        before = [target.tensors[0].clone() for target in (memory.targets.up, memory.targets.down)]
        engine.backward_dw(pending_of(case, engine=engine), memory.targets)
        after = memory.targets.up.tensors[0], memory.targets.down.tensors[0]
        found.append([now - then for now, then in zip(after, before, strict=True)])
    for ours, theirs in zip(*found, strict=True):
        error = relative(ours, theirs)
        assert bool((error < 5e-3).all()), error.tolist()


def test_float16():
    case = case_of(dtype=torch.float16)
    check_addition(case, memory_of(case, LAYOUTS[1], "stacked"))


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=ids)
def test_repeats_bit_for_bit(layout):
    case, results = case_of((4096, 512, 384, 6, 3)), []
    for _ in range(5):
        memory = memory_of(case, layout, "stacked_slices")
        OURS.backward_dw(pending_of(case), memory.targets)
        results.append([raw(allocation).clone() for allocation in memory.allocations])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("frozen", [("up",), ("down",), ("up", "down")], ids="-".join)
@pytest.mark.parametrize("stagewise", [False, True])
def test_frozen_projections(frozen, stagewise):
    case, layout = case_of(), LAYOUTS[0]
    settings = EngineSettings(frees_stagewise=stagewise)
    pending, memory = pending_of(case, settings), memory_of(case, layout, "stacked")
    dw1, dw2 = native(case, pending)
    nothing = WeightTarget.stacked(None, len(dw1), layout)
    wanted = {name: getattr(memory.targets, name) for name in ("up", "down")}
    targets = ParameterTargets(**wanted | dict.fromkeys(frozen, nothing))
    assert OURS.problem_of(targets, settings) is None
    OURS.backward_dw(pending, targets)
    assert pending.x is None
    memory.take(dw1 * ("up" not in frozen), dw2 * ("down" not in frozen))


def test_refused_before_anything_is_added():
    """The operands are still there, and accumulators take them."""
    case = case_of()
    pending, memory = pending_of(case), memory_of(case, LAYOUTS[3], "stacked")
    assert problem_of(memory).startswith("up-projection gradients hold all gate columns before")
    with pytest.raises(ConfigError, match="write gate and up columns in turns"):
        OURS.backward_dw(pending, memory.targets)
    torch.cuda.synchronize()
    memory.check()
    assert not memory.targets.adding
    native(case, pending)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=ids)
def test_replays_of_a_graph_add_each_time(layout):
    case = case_of()
    pending, memory = pending_of(case), memory_of(case, layout, "stacked_slices")
    gradients = native(case, pending)
    # Loads the kernels.
    OURS.backward_dw(replace(pending), memory_of(case, layout, "stacked_slices").targets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OURS.backward_dw(replace(pending), memory.targets)
    memory.check()  # a capture adds nothing
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        memory.take(*gradients)


@pytest.mark.parametrize("stagewise", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=ids)
def test_fp8_with_plain_weight_gradients(layout, stagewise):
    """The Hopper engine adds by the same GEMMs with `fp8_wgrad` off."""
    engine, settings = HopperEngine(), replace(FP8, fp8_wgrad=False, frees_stagewise=stagewise)
    case = case_of()
    memory = memory_of(case, layout, "stacked_slices")
    assert engine.problem_of(memory.targets, settings) is None
    check_addition(case, memory, settings, engine)
