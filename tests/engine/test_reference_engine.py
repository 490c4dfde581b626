"""What the reference engine promises beyond the laws of tests/oracle: spare rows, padding rows of operands,
weights that are NaN, adapters that it refuses, and products in fp32 whatever the program around it
asked for.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from engine.fp8_layer import with_spare_rows
from engine.moe_golden import (
    MODES,
    assert_same_bits,
    factors_of,
    make_problem,
    run_engine,
    set_up,
)
from framework import IS_PADDLE, numpy, tensor, torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters, LowRank
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


class TestNonFiniteTokens:
    @MODES
    def test_a_weight_that_is_nan_reaches_every_token_of_its_expert(self, settings):
        problem = make_problem(topk=1, empty=(), tokens=60)
        up_gate = problem.up_gate.copy()
        up_gate[2, 7, 5] = np.nan
        actual = run_engine(problem.but(up_gate=up_gate), settings)
        expected = run_engine(problem, settings)
        here = problem.indices[:, 0] == 2
        assert np.isnan(actual.out[here]).all()
        assert_same_bits(actual, expected, ("out", "dx"), ~here)


# ---- low-rank adapters ----


def adapters_of(setup, rank=5):
    pairs = factors_of(setup.problem, rank)
    return Adapters(*(LowRank(*(tensor(f, torch.float32) for f in pair), 0.7) for pair in pairs))


def run(setup, adapters):
    """`(out, dx, dprobs, gradients of the factors by name)`."""
    weights = setup.weights.with_adapters(adapters)
    out, saved = setup.engine.forward(setup.x, setup.routing, weights, setup.settings)
    dx, dprobs, pending = setup.engine.backward_dx(setup.dout, saved, weights)
    factors = pending.adapters()
    named = {
        name: numpy(g) for name, g in zip(NAMES_OF_FACTORS, factors, strict=True) if g is not None
    }
    return {"out": numpy(out), "dx": numpy(dx), "dprobs": numpy(dprobs)}, named


def test_no_token_is_no_error():
    setup = set_up(make_problem(tokens=0))
    layer, factors = run(setup, adapters_of(setup))
    assert layer["out"].shape == (0, 80) and not any(map(np.any, factors.values()))
    assert {name: gradient.shape for name, gradient in factors.items()} == {
        "up.a": (4, 5, 80), "up.b": (4, 96, 5), "down.a": (4, 5, 48), "down.b": (4, 80, 5),
    }  # fmt: skip


def changed(adapters, **changes):
    return adapters._replace(up=adapters.up._replace(**changes))


def test_what_is_refused():
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
    ):
        with pytest.raises(kind, match=words):
            run(setup, other)
    with pytest.raises(ShapeError, match="1 to 128"):
        run(setup, adapters_of(setup, rank=129))
    with pytest.raises(TypeError, match=r"^up is tuple; needed: a LowRank, or None"):
        run(setup, adapters._replace(up=(a, b)))


def test_without_a_pair_nothing_changes():
    setup = set_up(make_problem())
    assert setup.weights.with_adapters(Adapters()) is setup.weights
    assert setup.pending().adapters is None


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
