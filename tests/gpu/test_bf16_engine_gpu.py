"""The BF16 engine on the GEMMs of quack-kernels: the contract of the plain engines, every tiling, and
weight gradients straight into stacked parameters' memory, on the class for sm120, whose instructions
Hopper has too. Hopper's own GEMMs have `test_bf16_sm90_gpu.py`.
"""

from __future__ import annotations

import pytest
from gpu.engine_cases import (
    ARCH,
    SWIGLU,
    H,
    I,
    build,
    case_of,
    check,
    kernels_of_the_contract,
    make_case,
)
from gpu.engine_cases import SHAPES_OF_GRADIENTS as SHAPES
from gpu.engine_contract import PlainEngineContract
from gpu.gradient_memory import LAYOUTS, check_addition, ids, memory_of
from pairwise import pairwise

from sonicmoe.engine import bf16
from sonicmoe.engine.bf16 import Bf16Engine, ExpertRows
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.blackwell import quack_gemm
from sonicmoe.kernels.blackwell.quack_gemm import (
    MlpShape,
    all_kernels,
    candidates,
    grouped_gemms,
)
from sonicmoe.kernels.blackwell.quack_tilings import FAMILIES, PRODUCTS, SERVED_BY
from sonicmoe.kernels.cuda_wgrad import expert_rows_source
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu
pytest.importorskip("quack", reason="quack-kernels compiles these GEMMs, and is not installed here")

OURS = Bf16Engine()
FAMILY = "sm120"
SHAPE = MlpShape(H, I, SWIGLU, arch=ARCH, family=FAMILY)
# As this GPU runs them: without cluster launch control.
TILINGS = [(p, config) for p in PRODUCTS for config, _ in candidates(p, SHAPE)]
GELU = ActivationType.GELU
ARRANGEMENTS = ("stacked", "stacked_slices", "padded", "stacked_permuted", "experts_inside")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The engine takes this GPU for one that quack-kernels serves. Every variant of this module is
    built in parallel; nothing below may compile.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SERVED_BY, ARCH, FAMILY)
        patch.setattr(bf16, "_is_hopper", lambda device: False)
        gemms = kernels_of_the_contract(MlpShape, all_kernels)
        gemms += [forced(product, config) for product, config in TILINGS]
        sizes = {(h, i) for _, h, i, _, _ in SHAPES}
        shapes = [MlpShape(h, i, kind, arch=ARCH) for h, i in sizes for kind in (SWIGLU, GELU)]
        gemms += [kernel for shape in shapes for kernel in all_kernels(shape)]
        assert {dict(gemm.statics)["family"] for gemm in gemms} == {FAMILY}
        build([*cuda_sources(ARCH), expert_rows_source(ARCH), *gemms])
        with no_compile():
            yield


def forced(product, config):
    """The variant of one product with one tiling."""
    make = getattr(quack_gemm, f"{product}_kernel")
    return make(SHAPE, config=config, **({"store_z": True} if product == "up" else {}))


class TestBf16Engine(PlainEngineContract):
    engine = OURS

    def rows_of(self, routing):
        rows = ExpertRows.of(routing)
        return rows.cu_rows, rows.gather_index


@pytest.mark.parametrize(("product", "config"), TILINGS, ids=str)
def test_every_tiling(product, config, monkeypatch):
    monkeypatch.setitem(FAMILIES[FAMILY].candidates, product, ((config, 1.0),))
    grouped_gemms.cache_clear()
    try:
        check(make_case(seed=1), OURS)
    finally:
        grouped_gemms.cache_clear()


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
