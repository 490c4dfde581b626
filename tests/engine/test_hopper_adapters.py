"""Low-rank adapters in the passes of the Hopper engine, over kernels that are computed on the host,
against the reference engine.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from engine.fp8_layer import E, assert_same_bits
from engine.hopper_host import (  # noqa: F401
    FP8,
    MODES,
    OURS,
    REFERENCE,
    Case,
    H,
    I,
    assert_close,
    host_passes,
    native_fixture,
)
from framework import IS_PADDLE, torch
from kernels.needs import HOST_MODULE

from sonicmoe.engine import hopper_layer
from sonicmoe.engine.hopper_layer import HopperLayer
from sonicmoe.engine.low_rank import Adapters, LowRank

pytestmark = [*HOST_MODULE, pytest.mark.skipif(IS_PADDLE, reason="adapters are PyTorch's")]
FACTORS = "d_up_a", "d_up_b", "d_down_a", "d_down_b"


def pair_of(inputs, outputs, rank, dtype, scale):
    a, b = torch.randn(E, rank, inputs) * inputs**-0.5, torch.randn(E, outputs, rank)
    return LowRank(a.to(dtype), b.to(dtype), scale)


def adapters_of(which=("up", "down"), rank=16, dtype=torch.bfloat16, scale=0.5):
    torch.manual_seed(3)
    sizes = {"up": (H, 2 * I), "down": (I, H)}
    return Adapters(**{name: pair_of(*sizes[name], rank, dtype, scale) for name in which})


def run(case, engine, settings, adapters, donated=False):
    weights = engine.prepare_weights(case.w1, case.w2, case.b1, case.b2, settings)
    out, saved = engine.forward(case.x, case.routing, weights.with_adapters(adapters), settings)
    # The backward has records of its own, as a bridge makes them.
    weights = weights.with_adapters(adapters._replace())
    saved.wants_weights, saved.donated = False, donated
    dx, dprobs, pending = engine.backward_dx(case.dout, saved, weights)
    of_factors = dict(zip(FACTORS, pending.adapters(), strict=True))
    return {"out": out, "dx": dx, "dprobs": dprobs} | {
        name: found for name, found in of_factors.items() if found is not None
    }


CASES = (
    ("default", ("up", "down"), 16, torch.float32, False),
    ("default", ("up",), 3, torch.bfloat16, True),
    ("default", ("down",), 96, torch.bfloat16, False),
    ("recompute_z", ("up", "down"), 8, torch.bfloat16, True),
    ("stagewise", ("up", "down"), 20, torch.bfloat16, False),
    ("iso_weight", ("up", "down"), 16, torch.bfloat16, True),
    ("z in bf16", ("up", "down"), 16, torch.bfloat16, False),
)


@pytest.mark.parametrize(("mode", "which", "rank", "dtype", "biased"), CASES, ids=str)
def test_equal_the_reference_engine(mode, which, rank, dtype, biased):
    settings, case = replace(FP8, **MODES[mode]), Case(biased=biased)
    adapters = adapters_of(which, rank, dtype)
    wanted = run(case, REFERENCE, settings, adapters)
    got = run(case, OURS, settings, adapters)
    # Codes of y1s in place of values, and narrow rows of two roundings.
    assert_close(got, wanted, 0.04)
    without = {name: t for name, t in wanted.items() if not name.startswith("d_down_a")}
    assert_close({name: got[name] for name in without}, without, 6e-3)


@pytest.mark.parametrize("which", [("up", "down"), ("up",)], ids=str)
def test_gradients_of_rows(which):
    """Where operands of wgrad are not in FP8."""
    case, adapters, settings = Case(), adapters_of(which), replace(FP8, fp8_wgrad=False)
    assert_close(
        run(case, OURS, settings, adapters), run(case, REFERENCE, settings, adapters), 8e-3
    )


def test_operands_of_gradients_go_before_the_rows_of_dx(monkeypatch):
    case, adapters, held = Case(), adapters_of(), []
    wanted = run(case, OURS, FP8, adapters)
    empty_operands, empty_dx = HopperLayer.empty_operands, HopperLayer.empty_dx

    def operands(*given):
        held.append(weakref.ref((made := empty_operands(*given))[1]))
        return made

    monkeypatch.setattr(hopper_layer, "LONG_Z", 1)
    monkeypatch.setattr(HopperLayer, "empty_operands", operands)
    monkeypatch.setattr(HopperLayer, "empty_dx", lambda *a: held.append(held[0]()) or empty_dx(*a))
    assert_same_bits(run(case, OURS, FP8, adapters, donated=True), wanted)
    assert held[1:] == [None]


def test_quantised_tokens_are_read_as_they_are():
    case, adapters = Case().quantised("x", "dout"), adapters_of()
    assert_close(run(case, OURS, FP8, adapters), run(case, REFERENCE, FP8, adapters), 0.04)


def test_a_factor_of_zeros_changes_no_bit():
    case, adapters = Case(), adapters_of()
    zeros = Adapters(*(pair._replace(b=torch.zeros_like(pair.b)) for pair in adapters))
    with_zeros, without = run(case, OURS, FP8, zeros), case.run(OURS, FP8)
    for name in ("out", "dx", "dprobs"):
        assert torch.equal(with_zeros[name], without[name]), name


def test_no_row_is_no_error():
    case = Case(tokens=4, spare_rows=0, invalid=1.0)
    assert case.routing.num_rows == 0
    found = run(case, OURS, FP8, adapters_of())
    assert all(
        found[name].shape == t.shape and not found[name].any()
        for name, t in zip(FACTORS, adapters_of().factors, strict=True)
    )
