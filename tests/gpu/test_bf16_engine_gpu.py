"""The BF16 engine on the GEMMs of quack-kernels: every tiling of the class for sm120, whose instructions
Hopper has too. Hopper's own GEMMs have `test_oracle_gpu.py`.
"""

from __future__ import annotations

import pytest
from gpu.engine_cases import ARCH, SWIGLU, H, I, build, check, make_case
from kernels.gemm_matrix import tiled

from sonicmoe.engine import bf16
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.blackwell.quack_gemm import MlpShape, all_kernels, candidates, grouped_gemms
from sonicmoe.kernels.blackwell.quack_tilings import FAMILIES, PRODUCTS, SERVED_BY
from sonicmoe.kernels.cuda_wgrad import expert_rows_source

pytestmark = pytest.mark.gpu
pytest.importorskip("quack", reason="quack-kernels compiles these GEMMs, and is not installed here")

FAMILY = "sm120"
SHAPE = MlpShape(H, I, SWIGLU, arch=ARCH, family=FAMILY)
# As this GPU runs them: without cluster launch control.
TILINGS = [(p, config) for p in PRODUCTS for config, _ in candidates(p, SHAPE)]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The engine takes this GPU for one that quack-kernels serves. Every variant of this module is
    built in parallel; nothing below may compile.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SERVED_BY, ARCH, FAMILY)
        patch.setattr(bf16, "_is_hopper", lambda device: False)
        gemms = [*all_kernels(SHAPE), *(tiled(*tiling, SHAPE) for tiling in TILINGS)]
        assert {dict(gemm.statics)["family"] for gemm in gemms} == {FAMILY}
        build([*cuda_sources(ARCH), expert_rows_source(ARCH), *gemms])
        with no_compile():
            yield


@pytest.mark.parametrize(("product", "config"), TILINGS, ids=str)
def test_every_tiling(product, config, monkeypatch):
    monkeypatch.setitem(FAMILIES[FAMILY].candidates, product, ((config, 1.0),))
    grouped_gemms.cache_clear()
    try:
        check(make_case(seed=1), Bf16Engine())
    finally:
        grouped_gemms.cache_clear()
