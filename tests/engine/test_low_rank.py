"""Low-rank adapters in the reference engine, against the fp64 golden of the layer whose weights have
them merged: gradients of a and b follow from those of the merged weights by the product rule.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.low_rank_golden import SIZES, Adapted
from engine.moe_golden import golden, make_problem, set_up
from framework import numpy, relative_rmse, torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError, DTypeError, ShapeError
from sonicmoe.quant.recipes import RECIPES

FP8 = EngineSettings(recipe=RECIPES["dx256"])


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


def errors_of(setup, adapted):
    layer, factors = run(setup, adapted.adapters)
    exact = adapted.gradients()
    assert set(factors) == set(exact)
    found = {name: relative_rmse(got, getattr(adapted.golden, name)) for name, got in layer.items()}
    return found | {name: relative_rmse(factors[name], exact[name]) for name in exact}


CASES = (
    (ActivationType.SWIGLU, False, 1, ("up",)),
    (ActivationType.SWIGLU_OAI, True, 4, ("up", "down")),
    (ActivationType.GEGLU, False, 8, ("down",)),
    (ActivationType.RELU_SQ, True, 13, ("up", "down")),
)


@pytest.mark.parametrize(("activation", "bias", "rank", "which"), CASES, ids=str)
def test_fp32_is_exact(activation, bias, rank, which):
    problem = make_problem(activation, bias=bias)
    adapted = Adapted(problem, rank=rank, which=which)
    found = errors_of(set_up(problem), adapted)
    assert max(found.values()) < 2e-6, found
    # They change something, and an expert without tokens gets zeros.
    assert relative_rmse(adapted.golden.out, golden(problem).out) > 0.1
    assert not any(
        gradient[2].any() for gradient in run(set_up(problem), adapted.adapters)[1].values()
    )


def test_bf16_is_within_one_per_cent():
    problem = make_problem(dtype=torch.bfloat16, **SIZES)
    adapted = Adapted(problem, rank=16, dtype=torch.bfloat16)
    found = errors_of(set_up(problem, dtype=torch.bfloat16), adapted)
    assert max(found.values()) < 0.01, found


@pytest.mark.parametrize("recipe", ["dx256", "row128-dx256", "1x128"])
def test_fp8_is_within_the_bars_of_the_layer(recipe):
    problem = make_problem(dtype=torch.bfloat16, **SIZES)
    adapted = Adapted(problem, rank=16, dtype=torch.bfloat16)
    settings = replace(FP8, recipe=RECIPES[recipe])
    found = errors_of(set_up(problem, settings, torch.bfloat16), adapted)
    assert found["out"] < 0.066 and max(found.values()) < 0.069, found


@pytest.mark.parametrize("settings", [EngineSettings(), FP8], ids=["plain", "fp8"])
def test_modes_of_memory_have_the_same_bits(settings):
    """z computed again, and freed in the middle of the backward."""
    problem = make_problem(dtype=torch.bfloat16, **SIZES)
    adapters = Adapted(problem, dtype=torch.bfloat16).adapters
    kept = run(set_up(problem, settings, torch.bfloat16), adapters)
    for mode in ({"recompute_z": True}, {"frees_stagewise": True}, {}):
        again = run(set_up(problem, replace(settings, **mode), torch.bfloat16), adapters)
        for one, other in zip(kept, again, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_weights_that_train_beside_get_the_gradients_of_the_base():
    problem = make_problem()
    adapted, setup = Adapted(problem), set_up(problem)
    setup.weights = setup.weights.with_adapters(adapted.adapters)
    found = setup.run()
    for name, exact in adapted.golden.items():
        assert relative_rmse(getattr(found, name), exact) < 2e-6, name


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
