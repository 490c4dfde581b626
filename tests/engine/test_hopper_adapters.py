"""Low-rank adapters in the passes of the Hopper engine, over kernels that are computed on the host,
against the reference engine.
"""

from __future__ import annotations

import weakref

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
