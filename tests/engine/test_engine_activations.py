"""The activations: values, slopes against finite differences, kinks, NaN, extreme values."""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import ALL_ACTIVATIONS
from framework import IS_PADDLE, numpy, tensor, torch

from sonicmoe.diagnostics import formulas
from sonicmoe.engine import activations
from sonicmoe.engine.activations import (
    activate,
    activate_backward,
    value_and_slope,
)
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ACTIVATIONS, ActivationType, is_glu, layer_parameters
from sonicmoe.errors import ConfigError

OAI, CLAMP = ActivationType.SWIGLU_OAI, ActivationType.SWIGLU_CLAMP
SITU, SWIGLU = ActivationType.SITU_GLU, ActivationType.SWIGLU
FLEET = (("beta", 4.0), ("linear_beta", 25.0))
# What layers set, beside the defaults of every activation.
OWN = ((OAI, (("alpha", 1.1), ("limit", 2.0))), (CLAMP, (("limit", 2.0),)), (SITU, FLEET))
UNGATED = [a for a in ALL_ACTIVATIONS if not is_glu(a)]
GATED = [a for a in ALL_ACTIVATIONS if is_glu(a)]


def fp32(array, **options):
    return tensor(np.asarray(array), torch.float32, **options)


@pytest.mark.parametrize("activation", [ActivationType.RELU, ActivationType.RELU_SQ])
def test_slope_at_the_kink_is_zero(activation):
    got_value, got_slope = value_and_slope(fp32([0.0, -0.0]), activation)
    assert np.array_equal(numpy(got_value), [0.0, 0.0])
    assert np.array_equal(numpy(got_slope), [0.0, 0.0])


@pytest.mark.parametrize("activation", ALL_ACTIVATIONS, ids=lambda a: a.value)
def test_nan_stays_where_it_is(activation):
    z = np.random.default_rng(0).standard_normal((4, 8))
    z[2, 5] = np.nan
    columns = [2] if is_glu(activation) else [5]
    dy1 = fp32(np.ones((4, 4 if is_glu(activation) else 8)))
    y1, dz = (numpy(v) for v in activate_backward(fp32(z), dy1, activation))
    assert np.argwhere(np.isnan(y1)).tolist() == [[2, c] for c in columns]
    assert [2, 4 if is_glu(activation) else 5] in np.argwhere(np.isnan(dz)).tolist()
    assert np.isfinite(np.delete(dz, 2, axis=0)).all()


def gpt_oss(gate, up):
    clamped = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * clamped * torch.sigmoid(1.702 * clamped)


def bounded_swiglu(limit):
    def definition(gate, up):
        return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    return definition


def situ_glu(beta, linear_beta):
    def definition(gate, up):
        factor = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * factor

    return definition


# Below, on and beyond every bound of gate and up.
OF_CLAMPS = (-40, -1.1, -1, -0.7, -0.3, 0, 0.3, 0.7, 1, 1.1, 40)
OF_SITU = (-700, -30, -4, -1, -1e-3, 0, 1e-8, 0.2, 3, 60, 700)
# `(activation, its parameters, definition, ticks, relative tolerance of y1 and dz, absolute of dz)`.
# 1 - tanh^2 of SiTU's definition has rounding errors of 1e-16 where it should be smaller.
DEFINITIONS = [
    (OAI, {}, gpt_oss, [7.0 * t for t in OF_CLAMPS] + [-1.0], (1e-14, 1e-13), 1e-300),
    *(
        (CLAMP, {"limit": c}, bounded_swiglu(c), [c * t for t in OF_CLAMPS], (1e-13, 1e-12), 1e-300)
        for c in (0.5, 10.0)
    ),
    *(
        (SITU, {"beta": b, "linear_beta": l}, situ_glu(b, l), OF_SITU, (1e-13, 1e-12), 1e-12)
        for b in (0.5, 4.0, 1e30)
        for l in (None, 25.0, 0.3)
    ),
]


@pytest.mark.skipif(IS_PADDLE, reason="PyTorch's autograd is the reference")
@pytest.mark.parametrize(
    ("activation", "given", "definition", "ticks", "relative", "absolute"),
    DEFINITIONS,
    ids=[f"{activation.value}-{given}" for activation, given, *_ in DEFINITIONS],
)
def test_fp64_autograd_of_the_definition(activation, given, definition, ticks, relative, absolute):
    """Gradients pass on a bound and vanish beyond it, as those of torch.clamp."""
    line = torch.tensor(ticks, dtype=torch.float64)
    z = torch.cartesian_prod(line, line)
    gate, up = (column.clone().requires_grad_() for column in z.unbind(1))
    expected = definition(gate, up)
    expected.sum().backward()
    own = layer_parameters(activation, given)
    y1, dz = activate_backward(z, torch.ones_like(z[:, :1]), activation, own)
    assert torch.equal(y1, activate(z, activation, own))
    torch.testing.assert_close(y1[:, 0], expected.detach(), rtol=relative[0], atol=1e-300)
    wanted = torch.stack([gate.grad, up.grad], 1)
    torch.testing.assert_close(dz, wanted, rtol=relative[1], atol=absolute)
    if activation is SITU:
        return
    limit = ACTIVATIONS[activation].values(own)["limit"]
    beyond = torch.stack([gate > limit, up.abs() > limit], 1)
    assert int(beyond.sum()) > 0 and not dz[beyond].any()
    zero = -1.0 if activation is OAI else 0.0  # where the factor of up is 0
    assert bool(dz[(gate == limit) & (up != zero), 0].all())


class TestClamps:
    @pytest.mark.parametrize("activation", [OAI, CLAMP], ids=lambda a: a.value)
    @pytest.mark.parametrize("other", [0.5, 6.9, 7.1, -7.1])
    @pytest.mark.parametrize("side", [0, 1])
    def test_no_clamp_swallows_nan(self, side, other, activation):
        z = np.full((1, 2), other)
        z[0, side] = np.nan
        y1, dz = (numpy(v) for v in activate_backward(fp32(z), fp32([[1.0]]), activation))
        assert np.isnan(numpy(activate(fp32(z), activation))).all() and np.isnan(y1).all()
        assert np.isnan(dz[0, 0])

    def test_infinities_are_clamped_where_there_is_a_bound(self):
        z, dy1 = fp32([[np.inf, np.inf], [np.inf, -np.inf]]), fp32([[1.0], [1.0]])
        y1, dz = activate_backward(z, dy1, OAI)
        np.testing.assert_allclose(numpy(y1)[:, 0], [56.0, -42.0], rtol=1e-4)
        assert not numpy(dz).any()
        for bad in ((np.inf, 3.0), (3.0, np.inf), (3.0, -np.inf)):  # silu(-inf) is NaN everywhere
            y1, dz = (numpy(v) for v in activate_backward(fp32([bad]), fp32([[1.0]]), CLAMP))
            assert np.isfinite(y1).all() and not dz[0, int(np.isinf(bad[1]))]


class TestSituGlu:
    """beta tanh(gate / beta) sigmoid(gate) times lb tanh(up / lb), or times up."""

    @pytest.mark.parametrize("scaled", [0.1, 3.0, 8.0, -8.0])
    def test_slopes_keep_their_digits_where_tanh_is_flat(self, scaled):
        """1 - tanh(8)^2 is 4.5e-7, which an fp32 tanh of 1 would turn into 0 or 1.2e-7."""
        _, dz = activate_backward(fp32([[30.0, 25.0 * scaled]]), fp32([[1.0]]), SITU, FLEET)
        exact = 4.0 * np.tanh(7.5) * np.cosh(scaled) ** -2.0
        np.testing.assert_allclose(numpy(dz)[0, 1], exact, rtol=1e-5)

    def test_large_and_infinite_values_have_their_limits(self):
        for big in (1e4, 3e38, np.inf):
            z = fp32([[big, big], [big, -big], [-big, big], [-big, -big]])
            y1, dz = (numpy(v) for v in activate_backward(z, fp32(np.ones((4, 1))), SITU, FLEET))
            np.testing.assert_allclose(y1[:, 0], [100.0, -100.0, 0.0, 0.0], rtol=1e-6)
            assert not dz.any()
        y1, dz = activate_backward(fp32([[3.0, 1e30]]), fp32([[1.0]]), SITU)
        assert np.isfinite(numpy(y1)).all() and np.isfinite(numpy(dz)).all()

    def test_a_large_beta_is_silu(self):
        z = fp32(np.random.default_rng(1).standard_normal((9, 8)) * 3)
        own = layer_parameters(SITU, {"beta": 2.0**126, "linear_beta": 2.0**126})
        found, plain = activate(z, SITU, own), activate(z, SWIGLU)
        np.testing.assert_allclose(numpy(found), numpy(plain), rtol=1e-5)


@pytest.mark.parametrize("activation", GATED, ids=lambda a: a.value)
def test_a_gated_activation_has_no_slope_of_its_own(activation):
    with pytest.raises(ValueError, match="gated"):
        value_and_slope(fp32([1.0]), activation)


@pytest.mark.parametrize(
    ("activation", "own"),
    [*((activation, ()) for activation in ALL_ACTIVATIONS), *OWN],
    ids=[*(a.value for a in ALL_ACTIVATIONS), *(f"{a.value} of a layer" for a, _ in OWN)],
)
def test_the_formula_of_the_record_is_what_is_computed(activation, own):
    """Values and derivatives: the text, through dual numbers, against the tensor formulas."""
    rng = np.random.default_rng(11)
    z = rng.standard_normal((7, 12)) * 4
    dy1 = rng.standard_normal((7, 6 if is_glu(activation) else 12))
    wanted = formulas.activate(z, dy1, activation, own)
    found = activate_backward(fp32(z), fp32(dy1), activation, own)
    for got, golden in zip(found, wanted, strict=True):
        np.testing.assert_allclose(numpy(got), golden, rtol=2e-5, atol=5e-6)
    assert np.array_equal(numpy(activate(fp32(z), activation, own)), numpy(found[0]))


class TestParameters:
    def test_equal_layers_have_equal_settings(self):
        given = {"limit": 5, "alpha": 1.702}
        assert layer_parameters(OAI, given) == (("limit", 5.0),)
        settings = EngineSettings(OAI, activation_parameters=tuple(given.items()))
        assert settings.activation_parameters == (("limit", 5.0),)
        assert EngineSettings(OAI, activation_parameters=(("alpha", 1.702),)) == EngineSettings(OAI)
        assert hash(settings) != hash(EngineSettings(OAI))

    def test_none_leaves_a_parameter_out(self):
        assert layer_parameters(SITU, {"beta": 4, "linear_beta": None}) == (("beta", 4.0),)
        assert layer_parameters(SITU, {"linear_beta": 2.0**-126}) == (("linear_beta", 2.0**-126),)
        assert ACTIVATIONS[SITU].values()["linear_beta"] == np.inf


@pytest.mark.parametrize(
    ("table", "activation"), [("_UNGATED", ActivationType.SILU), ("_GATES", OAI)], ids=str
)
def test_a_record_without_a_formula_is_a_clear_error(monkeypatch, table, activation):
    monkeypatch.delitem(getattr(activations, table), activation)
    words = f"{activation.value!r} has a record and no tensor formula"
    with pytest.raises(ConfigError, match=words):
        activate(fp32([[1.0, 2.0]]), activation)
