"""The reference engine against the fp64 golden: every activation, bias, shape and token dtype, and
the ordinary edges.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import (
    ALL_ACTIVATIONS,
    OUTPUTS,
    golden,
    make_problem,
    run_engine,
    set_up,
    user_gradients,
)
from framework import relative_rmse, torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType
from sonicmoe.quant.recipes import RECIPES

SWIGLU = ActivationType.SWIGLU
FP8 = EngineSettings(recipe=RECIPES["iso128"])


def assert_matches(actual, expected, bound=1e-5):
    compared = dict(actual.items())
    assert set(compared) == {name for name, _ in expected.items()}
    for name, got in compared.items():
        want = getattr(expected, name)
        assert got.shape == want.shape, name
        assert np.isfinite(got).all(), name
        error = relative_rmse(got, want)
        assert error <= bound, f"{name}: relative RMSE {error:.3g} > {bound:.3g}"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ALL_ACTIVATIONS, ids=lambda a: a.value)
def test_fp32(activation, bias):
    problem = make_problem(activation, bias=bias)
    assert_matches(run_engine(problem), golden(problem))


OWN = {
    ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 2.5)),
    ActivationType.SWIGLU_CLAMP: (("limit", 1.5),),
}


@pytest.mark.parametrize("activation", OWN, ids=lambda a: a.value)
def test_parameters_of_a_layer(activation):
    problem = make_problem(activation, parameters=OWN[activation])
    exact = golden(problem)
    assert_matches(run_engine(problem), exact)
    defaults = golden(problem.but(parameters=()))
    assert all(relative_rmse(got, getattr(defaults, name)) > 0.05 for name, got in exact.items())


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1), (1, 80, 48, 2, 1), (9, 3, 5, 3, 2),
        (64, 128, 128, 2, 2), (33, 130, 129, 5, 4), (20, 16, 8, 12, 8),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("activation", [SWIGLU, ActivationType.RELU_SQ], ids=lambda a: a.value)
def test_shapes(activation, sizes):
    names = "tokens", "hidden", "intermediate", "experts", "topk"
    problem = make_problem(activation, empty=(), **dict(zip(names, sizes, strict=True)))
    assert_matches(run_engine(problem), golden(problem))


@pytest.mark.parametrize(
    ("name", "bound"), [("bfloat16", 1e-2), ("float16", 1.5e-3), ("float32", 1e-5)]
)
def test_token_dtypes(name, bound):
    dtype = getattr(torch, name)
    problem = make_problem(dtype=dtype, bias=True)
    setup = set_up(problem, dtype=dtype)
    out, saved = setup.forward()
    assert out.dtype == dtype
    assert saved.z.dtype == dtype
    dx, dprobs, pending = setup.engine.backward_dx(setup.dout, saved, setup.weights)
    assert dx.dtype == dtype
    assert dprobs.dtype == torch.float32
    setup.engine.backward_dw(pending, setup.accumulators())
    actual, exact = setup.run(), golden(problem)
    assert_matches(actual, exact, bound)
    if name != "float32":
        errors = (relative_rmse(getattr(actual, n), getattr(exact, n)) for n in OUTPUTS)
        assert min(errors) > 1e-4, "nothing was rounded"


@pytest.mark.parametrize("settings", [EngineSettings(), FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tokens(settings, dtype):
    problem = make_problem(tokens=0)
    result = run_engine(problem, settings, getattr(torch, dtype))
    assert result.out.shape == result.dx.shape == (0, 80)
    assert result.dprobs.shape == (0, 3)
    assert not result.dw1.any()
    assert not result.dw2.any()


@pytest.mark.parametrize("settings", [EngineSettings(), FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("sentinel", [-1, 4, 99])
def test_no_slot_is_routed_here(settings, sentinel):
    problem = make_problem(bias=True)
    result = run_engine(problem.but(indices=np.full_like(problem.indices, sentinel)), settings)
    for name, got in result.items():
        assert not got.any(), name


@pytest.mark.parametrize("settings", [EngineSettings(), FP8], ids=["plain", "fp8"])
def test_all_tokens_on_one_expert(settings):
    problem = make_problem(tokens=131, hidden=48, intermediate=32, topk=1)
    problem = problem.but(indices=np.full((131, 1), 3))
    result, exact = run_engine(problem, settings), golden(problem)
    assert_matches(result, exact, 1e-5 if settings.recipe is None else 0.12)
    assert not result.dw1[:3].any()
    assert not result.dw2[:3].any()


@pytest.mark.parametrize("settings", [EngineSettings(), FP8], ids=["plain", "fp8"])
def test_an_expert_without_tokens_is_left_untouched(settings):
    """Accumulators that hold something keep every bit of it; a NaN that must not be read stays one."""
    problem = make_problem(bias=True, empty=(1, 2))
    setup = set_up(problem, settings)
    accumulators = setup.accumulators()
    for held in accumulators.tensors():
        held[1] = held[1] + 7.25
        held[2] = held[2] + float("nan")
    _, saved = setup.forward()
    setup.engine.backward(setup.dout, saved, setup.weights, accumulators)
    for gradient in user_gradients(problem, accumulators):
        assert (gradient[1] == 7.25).all()
        assert np.isnan(gradient[2]).all()
        assert np.isfinite(gradient[0]).all()
        assert gradient[0].any()
