"""The BF16 engine on Hopper, on its own kernels: the contract of the plain engines, and gradients where
the caller has them.
"""

from __future__ import annotations

import pytest
from gpu.engine_cases import (
    ARCH,
    SWIGLU,
    build,
    case_of,
)
from gpu.engine_contract import PlainEngineContract
from gpu.gradient_memory import (
    LAYOUTS,
    check_repeats,
    check_replays,
    ids,
)

from sonicmoe.engine.bf16 import Bf16Engine, ExpertRows
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

    def rows_of(self, routing):
        rows = ExpertRows.of(routing)
        return rows.cu_rows, rows.gather_index


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=ids)
def test_repeats_bit_for_bit(layout):
    check_repeats(case_of((4096, 512, 384, 6, 3)), layout, "stacked_slices", OURS)


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=ids)
def test_replays_of_a_graph_add_each_time(layout):
    check_replays(case_of((700, 512, 384, 6, 3)), layout, "stacked_slices", OURS)
