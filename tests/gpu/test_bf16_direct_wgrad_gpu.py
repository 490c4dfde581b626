"""Weight gradients of the BF16 GEMMs added straight into stacked parameters' memory, on the GPU: the
bits of accumulating and flushing in every layout and arrangement, and not a byte beside them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from gpu.hopper_cases import FP8, fill_free_memory, raw
from gpu.plain_engine_cases import ARCH, SWIGLU, build, make_case, relative

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
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
OURS, REFERENCE = Bf16Engine(), ReferenceEngine()
CLASSES = ("sm90", "sm120")
# (T, H, I, E, K): tiles end inside of I and of H, I is an odd multiple of 8, one expert, many
SHAPES = [(700, 512, 384, 6, 3), (300, 264, 200, 4, 2), (130, 2880, 72, 1, 1), (600, 128, 136, 130, 4)]  # fmt: skip
LAYOUTS = [WeightLayout(t, s) for t, s in itertools.product((False, True), repeat=2)]
EVERY_LAYOUT = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda v: f"{'HN' if v.transposed else 'NH'}-{'halves' if v.split_half else 'turns'}"
)  # fmt: skip


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


class Memory:
    """Stacked gradient memory of one layer within larger allocations of known bytes, and what these
    must hold after additions.
    """

    def __init__(self, case, layout, arrangement):
        (experts, n1, hidden), inner = case.weights[0].shape, int(case.weights[1].shape[2])
        self.allocations, self.sizes = [], (n1, hidden, inner)
        shapes = ((n1, hidden), (hidden, inner))
        shapes = [shape[::-1] if layout.transposed else shape for shape in shapes]
        make = getattr(self, arrangement)
        self.tensors = [make(experts, *shape) for shape in shapes]
        self.targets = ParameterTargets(
            *(WeightTarget.stacked(tensor, experts, layout) for tensor in self.tensors)
        )
        self.wanted = [memory.clone() for memory in self.allocations]

    def allocate(self, *shape):
        generator = torch.Generator("cuda").manual_seed(len(self.allocations))
        self.allocations.append(torch.randn(shape, generator=generator, device="cuda"))
        return self.allocations[-1]

    def contiguous(self, experts, m, n):
        """Strangers before and behind it."""
        return self.allocate(experts * m * n + 64)[36:-28].view(experts, m, n)

    def slices(self, experts, m, n):
        """Equally far apart in a communication buffer that holds other gradients too."""
        return self.allocate(experts, m * n + 12)[:, 8:-4].unflatten(1, (m, n))

    def padded(self, experts, m, n):
        """Rows and experts apart from each other."""
        return self.allocate(experts, m + 1, n + 8)[:, :m, 4:-4]

    def permuted(self, experts, m, n):
        """The other order of a matrix's axes, rows padded."""
        return self.allocate(experts, n + 1, m + 8)[:, :n, 4:-4].transpose(1, 2)

    def experts_inside(self, experts, m, n):
        """Rows of all experts side by side."""
        return self.allocate(m, experts, n + 4)[:, :, :-4].transpose(0, 1)

    @property
    def problem(self):
        assert self.targets.problem(*self.sizes, "cuda:0") is None
        return OURS.problem_of(self.targets, EngineSettings())

    def expect(self, dw1, dw2):
        """Add native gradients where they belong, as a flush does."""
        held = [memory.clone() for memory in self.allocations]
        for memory, wanted in zip(self.allocations, self.wanted, strict=True):
            memory.copy_(wanted)
        for name, gradient in (("dw1", dw1), ("dw2", dw2)):
            for expert, matrix in enumerate(gradient):
                self.targets.add(name, expert, self.targets.arranged(name, matrix))
        self.wanted = [memory.clone() for memory in self.allocations]
        for memory, now in zip(self.allocations, held, strict=True):
            memory.copy_(now)

    def check(self):
        """Every byte of every allocation."""
        for index, (memory, wanted) in enumerate(zip(self.allocations, self.wanted, strict=True)):
            differ = int((raw(memory) != raw(wanted)).sum())
            assert differ == 0, f"allocation {index} {tuple(memory.shape)}: {differ} bytes differ"


ARRANGEMENTS = ("contiguous", "slices", "padded", "permuted", "experts_inside")


def case_of(shape=SHAPES[0], *, activation=SWIGLU, seed=0, dtype=torch.bfloat16):
    tokens, hidden, inner, experts, topk = shape
    return make_case(
        tokens, hidden=hidden, intermediate=inner, experts=experts, topk=topk, seed=seed,
        activation=activation, dtype=dtype, empty=(experts // 2,) if experts > 1 else (),
    )  # fmt: skip


def pending_of(case, settings=None, engine=OURS):
    settings = settings or EngineSettings(activation=case.activation)
    weights = engine.prepare_weights(*case.weights, settings)
    _, saved = engine.forward(case.x, case.routing, weights, settings)
    return engine.backward_dx(case.dout, saved, weights)[2]


def native(case, pending, engine=OURS):
    (experts, n1, hidden), inner = case.weights[0].shape, int(case.weights[1].shape[2])
    sums = NativeBuffer.zeros(experts, n1, hidden, inner, False, "cuda")
    engine.backward_dw(replace(pending), sums)
    assert sums.dw1.any() and sums.dw2.any()
    return sums.dw1, sums.dw2


def fits(layout, arrangement):
    """Where gate and up columns lie apart, H must be the contiguous axis."""
    return not layout.split_half or (arrangement == "permuted") == layout.transposed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@EVERY_LAYOUT
@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=lambda a: a.value)
def test_the_bits_of_accumulating_and_flushing(activation, layout, arrangement, shape):
    """Of two micro-batches; all bytes around are as before, also of experts without tokens."""
    if not is_glu(activation):
        layout = WeightLayout(layout.transposed, False)
    case = case_of(shape, activation=activation)
    memory = Memory(case, layout, arrangement)
    assert (memory.problem is None) == fits(layout, arrangement)
    if memory.problem is not None:
        return
    for seed in (0, 1):
        case = case_of(shape, activation=activation, seed=seed)
        pending = pending_of(case)
        gradients = native(case, pending)
        fill_free_memory(0xFF)
        OURS.backward_dw(pending, memory.targets)
        assert not memory.targets.adding and pending.dz is None
        memory.expect(*gradients)
        memory.check()


@pytest.mark.parametrize(
    ("family", "config"),
    [(family, config) for family in CLASSES for config in tilings(family)],
    indirect=["family"],
    ids=str,
)
@pytest.mark.parametrize("arrangement", ["padded", "permuted"])
@EVERY_LAYOUT
def test_every_tiling(layout, arrangement, family, config, monkeypatch):
    if not fits(layout, arrangement):
        pytest.skip("refused")
    for product in ("wgrad_down", "wgrad_up"):
        monkeypatch.setitem(FAMILIES[family].candidates, product, ((config, 1.0),))
    grouped_gemms.cache_clear()
    try:
        case = case_of(SHAPES[1])
        pending, memory = pending_of(case), Memory(case, layout, arrangement)
        gradients = native(case, pending)
        OURS.backward_dw(pending, memory.targets)
        memory.expect(*gradients)
        memory.check()
    finally:
        grouped_gemms.cache_clear()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[2]], ids=str)
def test_what_the_reference_engine_adds(layout):
    """So that no mistake can hide in what both paths of this engine share."""
    case = case_of()
    ours, theirs = Memory(case, layout, "slices"), Memory(case, layout, "slices")
    before = [tensor.clone() for tensor in ours.tensors]
    for engine, memory in ((OURS, ours), (REFERENCE, theirs)):
        engine.backward_dw(pending_of(case, engine=engine), memory.targets)
    for found, wanted, start in zip(ours.tensors, theirs.tensors, before, strict=True):
        error = relative(found - start, wanted - start)
        assert bool((error < 5e-3).all()), error.tolist()


def test_float16():
    case = case_of(dtype=torch.float16)
    pending, memory = pending_of(case), Memory(case, LAYOUTS[1], "contiguous")
    gradients = native(case, pending)
    OURS.backward_dw(pending, memory.targets)
    memory.expect(*gradients)
    memory.check()


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]], ids=str)
def test_repeats_bit_for_bit(layout):
    case = case_of((4096, 512, 384, 6, 3))
    results = []
    for _ in range(5):
        memory = Memory(case, layout, "slices")
        OURS.backward_dw(pending_of(case), memory.targets)
        results.append([raw(allocation).clone() for allocation in memory.allocations])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("frozen", [("up",), ("down",), ("up", "down")], ids="-".join)
@pytest.mark.parametrize("stagewise", [False, True])
def test_frozen_projections(frozen, stagewise):
    case, layout = case_of(), LAYOUTS[0]
    settings = EngineSettings(frees_stagewise=stagewise)
    pending, memory = pending_of(case, settings), Memory(case, layout, "contiguous")
    dw1, dw2 = native(case, pending)
    nothing = WeightTarget.stacked(None, len(dw1), layout)
    wanted = {name: getattr(memory.targets, name) for name in ("up", "down")}
    targets = ParameterTargets(**wanted | dict.fromkeys(frozen, nothing))
    assert OURS.problem_of(targets, settings) is None
    OURS.backward_dw(pending, targets)
    assert pending.x is None
    memory.expect(dw1 * ("up" not in frozen), dw2 * ("down" not in frozen))
    memory.check()


def test_refused_before_anything_is_added():
    """The operands are still there, and accumulators take them."""
    case = case_of()
    pending, memory = pending_of(case), Memory(case, LAYOUTS[3], "contiguous")
    assert memory.problem.startswith("up-projection gradients hold all gate columns before")
    with pytest.raises(ConfigError, match="write gate and up columns in turns"):
        OURS.backward_dw(pending, memory.targets)
    torch.cuda.synchronize()
    memory.check()
    assert not memory.targets.adding
    native(case, pending)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1]], ids=str)
def test_replays_of_a_graph_add_each_time(layout):
    case = case_of()
    pending, memory = pending_of(case), Memory(case, layout, "slices")
    gradients = native(case, pending)
    OURS.backward_dw(replace(pending), Memory(case, layout, "slices").targets)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OURS.backward_dw(replace(pending), memory.targets)
    memory.check()  # a capture adds nothing
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        memory.expect(*gradients)
        memory.check()


@pytest.mark.parametrize("stagewise", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_fp8_with_plain_weight_gradients(layout, stagewise):
    """The Hopper engine adds by the same GEMMs with `fp8_wgrad` off."""
    engine, settings = HopperEngine(), replace(FP8, fp8_wgrad=False, frees_stagewise=stagewise)
    case = case_of()
    memory = Memory(case, layout, "slices")
    assert engine.problem_of(memory.targets, settings) is None
    pending = pending_of(case, settings, engine)
    gradients = native(case, pending, engine)
    engine.backward_dw(pending, memory.targets)
    memory.expect(*gradients)
    memory.check()
