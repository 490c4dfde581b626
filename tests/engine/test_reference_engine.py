"""What the reference engine promises beyond the laws of tests/oracle: spare rows, padding rows of operands,
memory that is freed stage by stage, and products in fp32 whatever the program around it asked for.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace

import pytest
from engine.fp8_layer import with_spare_rows
from engine.moe_golden import (
    FP8,
    MODES,
    assert_same_bits,
    make_problem,
    run_engine,
    set_up,
)
from framework import IS_PADDLE, numpy, torch

from sonicmoe.engine import reference, reference_operands
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.interop import ieee_matmul


class TestPoison:
    """No output depends on a byte that the call did not write or that no valid slot names."""

    @MODES
    def test_more_rows_than_needed(self, settings):
        """A builder that does not know the counts sizes its rows for the worst case; the rest is
        padding too.
        """
        setup = set_up(make_problem(bias=True), settings)
        oversized = replace(setup, routing=with_spare_rows(setup.routing, 256))
        assert_same_bits(oversized.run(), setup.run())

    @MODES
    def test_padding_rows_of_wgrad_operands_are_zero(self, settings):
        """A GPU kernel may read whole tiles: what backward hands over holds finite zeros beyond the
        true rows.
        """
        setup = set_up(make_problem(bias=True), settings)
        pending = setup.pending()
        padding = numpy(setup.routing.row_token) < 0
        assert padding.any()
        for rows in (pending.dz, pending.y1s):
            assert not numpy(rows)[padding].any()
            assert numpy(rows)[~padding].any()


# ---- stage-wise memory ----


@pytest.mark.parametrize("frees", [True, False])
def test_operands_are_dead_before_the_next_product(monkeypatch, frees):
    """Without a collection of garbage: z before dx, the operands of dw2 before dw1. A second call says so."""
    setup, alive = set_up(make_problem(), replace(FP8, frees_stagewise=frees)), []

    def watch(module, function, stage, memory):
        original, watched = getattr(module, function), weakref.ref(memory)

        def spy(values, name, *rest):
            if name == stage:
                alive.append(watched() is not None)
            return original(values, name, *rest)

        monkeypatch.setattr(module, function, spy)

    _, saved = setup.forward()
    watch(reference, "operand", "dz", saved.z.codes)
    *_, pending = setup.engine.backward_dx(setup.dout, saved, setup.weights)
    watch(reference_operands, "operand", "wgrad_x", pending.y1s)
    setup.engine.backward_dw(pending, setup.accumulators())
    assert alive == [not frees] * 2
    assert (saved.x is None) == (saved.z is None) == frees
    if frees:
        with pytest.raises(RuntimeError, match="released"):
            setup.engine.backward_dx(setup.dout, saved, setup.weights)
        with pytest.raises(RuntimeError, match="released"):
            setup.engine.backward_dw(pending, setup.accumulators())


# ---- products in fp32 ----


def switches():
    if IS_PADDLE:
        return sys.modules["paddle"].base.core.get_cublas_switch()
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture(params=["highest", "medium"])
def relaxed(request):
    """Fast products on (the PyTorch call sets GPU and CPU), or off; as before afterwards."""
    if IS_PADDLE:
        core = sys.modules["paddle"].base.core
        before = core.get_cublas_switch()
        core.set_cublas_switch(request.param == "medium")
        yield
        core.set_cublas_switch(before)
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(request.param)
        yield
        torch.set_float32_matmul_precision(before)


def test_no_bit_depends_on_the_programs_choice(relaxed):
    problem, found = make_problem(), switches()
    fast = run_engine(problem, EngineSettings())
    with ieee_matmul():
        exact = run_engine(problem, EngineSettings())
    assert_same_bits(fast, exact)
    assert switches() == found
