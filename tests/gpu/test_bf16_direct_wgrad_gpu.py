"""Weight gradients of quack-kernels' GEMMs added straight into stacked parameters' memory, on the GPU,
by the class for sm120: the bits of accumulating and flushing in every layout and arrangement, and not
a byte beside them. Hopper's own GEMMs have `test_bf16_sm90_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
from gpu.engine_cases import ARCH, REFERENCE, SWIGLU, build, make_case, relative
from gpu.gradient_memory import LAYOUTS, accumulated, check_addition, ids, memory_of, pending_of
from pairwise import pairwise

from sonicmoe.engine import bf16
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.errors import ConfigError
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.quack_gemm import MlpShape, all_kernels, expert_rows_source
from sonicmoe.kernels.quack_tilings import served_by
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

GELU = ActivationType.GELU
OURS = Bf16Engine()
# (T, H, I, E, K): tiles end inside of I and of H, I is an odd multiple of 8, one expert, many
SHAPES = [(700, 512, 384, 6, 3), (300, 264, 200, 4, 2), (130, 2880, 72, 1, 1), (600, 128, 136, 130, 4)]  # fmt: skip
ARRANGEMENTS = ("stacked", "stacked_slices", "padded", "stacked_permuted", "experts_inside")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The engine takes this GPU for one that quack-kernels serves. What a warm-up of these shapes
    compiles is built in parallel; nothing else may compile.
    """
    with served_by(ARCH, "sm120"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16, "_is_hopper", lambda device: False)
        sizes = {(h, i) for _, h, i, _, _ in SHAPES}
        shapes = [MlpShape(h, i, kind, arch=ARCH) for h, i in sizes for kind in (SWIGLU, GELU)]
        gemms = [kernel for shape in shapes for kernel in all_kernels(shape)]
        build([*cuda_sources(ARCH), expert_rows_source(ARCH), *gemms])
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
