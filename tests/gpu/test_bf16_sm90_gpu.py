"""The BF16 engine on Hopper, on its own kernels: the contract of the plain engines. Gradients where the caller
has them are added by test_direct_wgrad_gpu.py, too.
"""

from __future__ import annotations

import pytest
from gpu.engine_cases import ARCH, SWIGLU, build
from gpu.engine_contract import PlainEngineContract

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.cuda_wgrad import expert_rows_source
from sonicmoe.kernels.sm90 import bf16_sources, engine_sources

pytestmark = pytest.mark.gpu

OURS = Bf16Engine()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every kernel of this module, built in parallel; nothing below may compile."""
    own = [*engine_sources(ARCH, SWIGLU), *bf16_sources(ARCH, SWIGLU).values()]
    build([*cuda_sources(ARCH), expert_rows_source(ARCH), *own])
    with no_compile():
        yield


class TestBf16OnHopper(PlainEngineContract):
    """Of native weights."""

    engine = OURS
