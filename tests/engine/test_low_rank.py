"""Low-rank adapters in the reference engine, against the fp64 golden of the layer whose weights have
them merged: gradients of a and b follow from those of the merged weights by the product rule.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.low_rank_golden import Adapted
from engine.moe_golden import make_problem, set_up
from framework import numpy, torch

from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters
from sonicmoe.errors import ConfigError, DTypeError, ShapeError


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
    problem = make_problem(tokens=0)
    layer, factors = run(set_up(problem), Adapted(problem).adapters)
    assert layer["out"].shape == (0, 80) and not any(map(np.any, factors.values()))
    assert {name: gradient.shape for name, gradient in factors.items()} == {
        "up.a": (4, 5, 80), "up.b": (4, 96, 5), "down.a": (4, 5, 48), "down.b": (4, 80, 5),
    }  # fmt: skip


def changed(adapters, **changes):
    return adapters._replace(up=adapters.up._replace(**changes))


def test_what_is_refused():
    problem = make_problem()
    setup, adapters = set_up(problem), Adapted(problem).adapters
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
        run(setup, Adapted(problem, rank=129).adapters)
    with pytest.raises(TypeError, match=r"^up is tuple; needed: a LowRank, or None"):
        run(setup, adapters._replace(up=(a, b)))


def test_without_a_pair_nothing_changes():
    problem = make_problem()
    setup = set_up(problem)
    assert setup.weights.with_adapters(Adapters()) is setup.weights
    assert setup.pending().adapters is None
