"""The BF16 engine on the GPU: the contract of the plain engines, and every tiling, on the GEMM class
of this GPU's family and on that for sm120, whose instructions Hopper has too.
"""

from __future__ import annotations

import pytest
from gpu.engine_cases import (
    ARCH,
    SWIGLU,
    H,
    I,
    build,
    check_plain,
    kernels_of_the_contract,
    make_case,
    run,
)
from gpu.engine_contract import PlainEngineContract

from sonicmoe.engine.bf16 import Bf16Engine, ExpertRows
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources, quack_gemm
from sonicmoe.kernels.quack_gemm import (
    MlpShape,
    all_kernels,
    candidates,
    expert_rows_source,
    grouped_gemms,
)
from sonicmoe.kernels.quack_tilings import FAMILIES, PRODUCTS, served_by

pytestmark = pytest.mark.gpu

OURS = Bf16Engine()
CLASSES = ("sm90", "sm120")


def tilings(family):
    """As this GPU runs them: without cluster launch control."""
    shape = MlpShape(H, I, SWIGLU, arch=ARCH, family=family)
    return [(p, config) for p in PRODUCTS for config, _ in candidates(p, shape)]


@pytest.fixture(scope="module", params=CLASSES, autouse=True)
def family(request):
    """Whose GEMM class the engine runs; its numbers are compared with the same yardstick."""
    with served_by(ARCH, request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def compiled(family):
    """Every variant of this module, built in parallel; nothing below may compile."""
    gemms = kernels_of_the_contract(MlpShape, all_kernels)
    gemms += [forced(product, config) for product, config in tilings(family)]
    assert {dict(gemm.statics)["family"] for gemm in gemms} == {family}
    build([*cuda_sources(ARCH), expert_rows_source(ARCH), *gemms])
    with no_compile():
        yield


def forced(product, config):
    """The variant of one product with one tiling."""
    make = getattr(quack_gemm, f"{product}_kernel")
    options = {"store_z": True} if product == "up" else {}
    return make(MlpShape(H, I, SWIGLU, arch=ARCH), config=config, **options)


class TestBf16Engine(PlainEngineContract):
    """Each test once per GEMM class."""

    engine = OURS

    def rows_of(self, routing):
        rows = ExpertRows.of(routing)
        return rows.cu_rows, rows.gather_index


@pytest.mark.parametrize(
    ("family", "product", "config"),
    [(family, *tiling) for family in CLASSES for tiling in tilings(family)],
    indirect=["family"],
    ids=str,
)
def test_every_tiling(family, product, config, monkeypatch):
    """Also at sizes that no tile divides: 512 = 2 x 192 + 128, 768 = 3 x 256, 384 = 256 + 128."""
    monkeypatch.setitem(FAMILIES[family].candidates, product, ((config, 1.0),))
    grouped_gemms.cache_clear()
    try:
        check_plain(case := make_case(seed=1), run(case, OURS))
    finally:
        grouped_gemms.cache_clear()
