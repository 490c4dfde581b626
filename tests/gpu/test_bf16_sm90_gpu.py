"""The BF16 engine on Hopper, on its own kernels: the contract of the plain engines, and gradients where
the caller has them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from gpu.device import fill_free_memory
from gpu.engine_cases import (
    ARCH,
    SWIGLU,
    build,
    case_of,
)
from gpu.engine_cases import SHAPES_OF_GRADIENTS as SHAPES
from gpu.engine_contract import PlainEngineContract
from gpu.gradient_memory import (
    LAYOUTS,
    check_frozen_projections,
    check_repeats,
    check_replays,
    ids,
    memory_of,
)
from pairwise import pairwise

from sonicmoe.engine.bf16 import Bf16Engine, ExpertRows
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.jit import no_compile
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.cuda_wgrad import expert_rows_source
from sonicmoe.kernels.sm90 import bf16_sources, engine_sources
from sonicmoe.layouts import WeightLayout
from sonicmoe.weight_source import WeightSource

pytestmark = pytest.mark.gpu

OURS = Bf16Engine()
GELU = ActivationType.GELU
ARRANGEMENTS = (
    "stacked", "stacked_slices", "padded", "stacked_permuted", "experts_inside", "own", "slices",
    "permuted", "some_frozen",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every kernel of this module, built in parallel; nothing below may compile."""
    own = [source for kind in (SWIGLU, GELU) for source in bf16_sources(ARCH, kind).values()]
    build([*cuda_sources(ARCH), expert_rows_source(ARCH), *engine_sources(ARCH, SWIGLU), *own])
    with no_compile():
        yield


class TestBf16OnHopper(PlainEngineContract):
    """Of native weights."""

    engine = OURS

    def rows_of(self, routing):
        rows = ExpertRows.of(routing)
        return rows.cu_rows, rows.gather_index


def lying(case, layout):
    """The weights of a case in a layout, as the engine reads them."""
    w1, w2, *_ = case.weights
    source = WeightSource.stacked(layout.user_w1(w1), layout.user_w2(w2), layout=layout)
    return OURS.refresh(source, EngineSettings(activation=case.activation))


def pending_in(case, layout, settings=None):
    settings = settings or EngineSettings(activation=case.activation)
    weights = lying(case, layout)
    _, saved = OURS.forward(case.x, case.routing(), weights, settings)
    return OURS.backward_dx(case.dout, saved, weights)


def fits_activation(layout, activation):
    return layout if is_glu(activation) else WeightLayout(layout.transposed, False)


@pytest.mark.parametrize(
    ("shape", "arrangement", "layout", "activation"),
    pairwise(SHAPES, ARRANGEMENTS, LAYOUTS, [SWIGLU, GELU]),
    ids=ids,
)
def test_the_bits_of_accumulating_and_flushing(activation, layout, arrangement, shape):
    """Of two micro-batches; all bytes around are as before, also of experts without tokens."""
    layout = fits_activation(layout, activation)
    memory = memory_of(case_of(shape, activation=activation), layout, arrangement)
    for seed in (0, 1):
        case = case_of(shape, activation=activation, seed=seed)
        settings = EngineSettings(activation=activation)
        assert OURS.problem_of(memory.targets, settings, layout) is None
        _, _, pending = pending_in(case, layout)
        sums = case.accumulators()
        OURS.backward_dw(replace(pending), sums)
        fill_free_memory(0xFF)
        OURS.backward_dw(pending, memory.targets)
        memory.take(sums.dw1, sums.dw2)


@pytest.mark.parametrize(
    ("weights", "gradients"), list(itertools.product(LAYOUTS, LAYOUTS)), ids=ids
)
def test_gradients_in_another_layout_than_their_weights(weights, gradients):
    case = case_of(SHAPES[0])
    memory = memory_of(case, gradients, "stacked")
    problem = OURS.problem_of(memory.targets, EngineSettings(), weights)
    same = weights.split_half == gradients.split_half
    assert (problem is None) == (same or (weights.split_half and not gradients.transposed))
    if problem is None:
        _, _, pending = pending_in(case, weights)
        sums = case.accumulators()
        OURS.backward_dw(replace(pending), sums)
        OURS.backward_dw(pending, memory.targets)
        memory.take(sums.dw1, sums.dw2)


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=ids)
def test_repeats_bit_for_bit(layout):
    check_repeats(case_of((4096, 512, 384, 6, 3)), layout, "stacked_slices", OURS)


@pytest.mark.parametrize("stagewise", [False, True])
def test_frozen_projections(stagewise):
    case, settings = case_of(SHAPES[0]), EngineSettings(frees_stagewise=stagewise)
    check_frozen_projections(case, memory_of(case, LAYOUTS[0], "stacked"), OURS, settings)


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=ids)
def test_replays_of_a_graph_add_each_time(layout):
    check_replays(case_of(SHAPES[0]), layout, "stacked_slices", OURS)
