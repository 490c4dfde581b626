"""What the reference engine promises beyond the laws of tests/oracle: spare rows, padding rows of operands,
weights that are NaN, memory that is freed stage by stage, adapters that it refuses, and products in fp32
whatever the program around it asked for.
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
    factors_of,
    make_problem,
    run_engine,
    set_up,
)
from framework import IS_PADDLE, numpy, tensor, torch

from sonicmoe.engine import reference, reference_operands
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.low_rank import Adapters, LowRank
from sonicmoe.errors import ConfigError, DTypeError, ShapeError
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


# ---- low-rank adapters ----


def adapters_of(setup, rank=5):
    pairs = factors_of(setup.problem, rank)
    return Adapters(*(LowRank(*(tensor(f, torch.float32) for f in pair), 0.7) for pair in pairs))


def changed(adapters, **changes):
    return adapters._replace(up=adapters.up._replace(**changes))


def test_adapters_that_are_refused():
    setup = set_up(make_problem())
    adapters = adapters_of(setup)
    a, b = adapters.up.a, adapters.up.b
    for other, kind, words in (
        (changed(adapters, a=a[:3]), ShapeError, r"^up.a has shape \(3, 5, 80\); needed: \[E, r"),
        (changed(adapters, a=a[:, :, :79]), ShapeError, r"needed: .* = \[4, 1 to 128, 80\]"),
        (changed(adapters, b=b[:, :95]), ShapeError, r"^up.b .* = \(4, 96, 5\)"),
        (changed(adapters, b=b[:, :, :4]), ShapeError, r"^up.b .* = \(4, 96, 5\)"),
        (changed(adapters, a=a.to(torch.int32)), DTypeError, r"^up.a is int32; needed: bfloat16"),
        (changed(adapters, scale=float("nan")), ConfigError, r"^up.scale is nan; needed: a finite"),
        (adapters_of(setup, rank=129), ShapeError, "1 to 128"),
        (adapters._replace(up=(a, b)), TypeError, r"^up is tuple; needed: a LowRank, or None"),
    ):
        with pytest.raises(kind, match=words):
            weights = setup.weights.with_adapters(other)
            setup.engine.forward(setup.x, setup.routing, weights, setup.settings)


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
