"""Weight gradients of the BF16 GEMMs added straight into stacked parameters' memory, on the GPU: the
bits of accumulating and flushing in every layout and arrangement, and not a byte beside them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from gpu.engine_cases import ARCH, FP8, FP16, REFERENCE, SWIGLU, build, make_case, relative
from gpu.gradient_memory import (
    LAYOUTS,
    accumulated,
    check_addition,
    check_frozen_projections,
    check_repeats,
    check_replays,
    ids,
    memory_of,
    pending_of,
)
from pairwise import pairwise

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
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


def case_of(shape=SHAPES[0], **options):
    tokens, hidden, inner, experts, topk = shape
    empty = (experts // 2,) if experts > 1 else ()
    sizes = {"hidden": hidden, "intermediate": inner, "experts": experts, "topk": topk}
    return make_case(tokens, **sizes, empty=empty, **options)


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
    problem = OURS.problem_of(memory.targets, EngineSettings())
    assert (problem is None) == fits(layout, arrangement)
    if fits(layout, arrangement):
        for seed in (0, 1):
            check_addition(case_of(shape, activation=activation, seed=seed), memory, OURS)


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
        check_addition(case, memory_of(case, layout, arrangement), OURS)
    finally:
        grouped_gemms.cache_clear()


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=ids)
def test_what_the_reference_engine_adds(layout):
    """So that no mistake can hide in what both paths of this engine share."""
    case, found = case_of(), []
    for engine in (OURS, REFERENCE):
        memory = memory_of(case, layout, "stacked_slices")
        before = [target.tensors[0].clone() for target in (memory.targets.up, memory.targets.down)]
        engine.backward_dw(pending_of(case, engine), memory.targets)
        after = memory.targets.up.tensors[0], memory.targets.down.tensors[0]
        found.append([now - then for now, then in zip(after, before, strict=True)])
    for ours, theirs in zip(*found, strict=True):
        error = relative(ours, theirs)
        assert bool((error < 5e-3).all()), error.tolist()


def test_float16():
    case = case_of(dtype=FP16)
    check_addition(case, memory_of(case, LAYOUTS[1], "stacked"), OURS)


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=ids)
def test_repeats_bit_for_bit(layout):
    check_repeats(case_of((4096, 512, 384, 6, 3)), layout, "stacked_slices", OURS)


@pytest.mark.parametrize("stagewise", [False, True])
def test_frozen_projections(stagewise):
    case, settings = case_of(), EngineSettings(frees_stagewise=stagewise)
    check_frozen_projections(case, memory_of(case, LAYOUTS[0], "stacked"), OURS, settings)


def test_refused_before_anything_is_added():
    """The operands are still there, and accumulators take them."""
    case = case_of()
    pending, memory = pending_of(case, OURS), memory_of(case, LAYOUTS[3], "stacked")
    problem = OURS.problem_of(memory.targets, EngineSettings())
    assert problem.startswith("up-projection gradients hold all gate columns before")
    with pytest.raises(ConfigError, match="write gate and up columns in turns"):
        OURS.backward_dw(pending, memory.targets)
    torch.cuda.synchronize()
    memory.check()
    assert not memory.targets.adding
    accumulated(case, OURS, pending)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=ids)
def test_replays_of_a_graph_add_each_time(layout):
    check_replays(case_of(), layout, "stacked_slices", OURS)


@pytest.mark.parametrize("stagewise", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=ids)
def test_fp8_with_plain_weight_gradients(layout, stagewise):
    """The Hopper engine adds by the same GEMMs with `fp8_wgrad` off."""
    settings, case = replace(FP8, fp8_wgrad=False, frees_stagewise=stagewise), case_of()
    check_addition(case, memory_of(case, layout, "stacked_slices"), HopperEngine(), settings)
