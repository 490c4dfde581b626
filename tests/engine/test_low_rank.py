"""Low-rank adapters that an engine is given: no token, what is refused, and no pair. tests/oracle has the
numbers.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import factors_of, make_problem, set_up
from framework import numpy, tensor, torch

from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters, LowRank
from sonicmoe.errors import ConfigError, DTypeError, ShapeError


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
