"""The activations: values and slopes of their definitions, bounds, NaN at a bound, extreme values."""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import ALL_ACTIVATIONS
from framework import numpy, tensor, torch
from oracle.golden import base_of, slope, up_factor, value

from sonicmoe.diagnostics import formulas
from sonicmoe.engine import activations
from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ACTIVATIONS, ActivationType, is_glu, layer_parameters
from sonicmoe.errors import ConfigError

OAI, CLAMP = ActivationType.SWIGLU_OAI, ActivationType.SWIGLU_CLAMP
SITU, SWIGLU = ActivationType.SITU_GLU, ActivationType.SWIGLU
FLEET = (("beta", 4.0), ("linear_beta", 25.0))
# What layers set, beside the defaults of every activation.
OWN = ((OAI, (("alpha", 1.1), ("limit", 2.0))), (CLAMP, (("limit", 2.0),)), (SITU, FLEET))
GATED = [a for a in ALL_ACTIVATIONS if is_glu(a)]


def fp32(array):
    return tensor(np.asarray(array), torch.float32)


def fp64(array):
    return tensor(np.asarray(array), torch.float64)


# Below, on and beyond every bound of gate and up, at a kink, and where tanh and the sigmoid are flat.
TICKS = (
    -700, -40, -10, -7.7, -7, -4, -2, -1, -1e-3, -0.0, 0, 1e-8, 0.3, 1.1, 2, 7, 7.1, 10, 60, 700,
)  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "own"),
    [*((activation, ()) for activation in ALL_ACTIVATIONS), *OWN],
    ids=[*(a.value for a in ALL_ACTIVATIONS), *(f"{a.value} of a layer" for a, _ in OWN)],
)
def test_values_and_derivatives_are_those_of_the_definition(activation, own):
    """Of the golden's, and of the record's text. Gradients pass on a bound and vanish beyond it, as
    those of torch.clamp; a kink of ReLU has none.
    """
    ticks = np.float64(TICKS)
    gate, up = (grid.ravel() for grid in np.meshgrid(ticks, ticks, indexing="ij"))
    gated = is_glu(activation)
    z = np.stack([gate, up], 1) if gated else ticks[:, None]
    own = layer_parameters(activation, dict(own))
    v = gate if gated else ticks
    with np.errstate(over="ignore"):
        act, d_act = (f(base_of(activation.value), v, own) for f in (value, slope))
        factor, d_factor = up_factor(activation.value, up, own) if gated else (1.0, 0.0)
        y1, dz = act * factor, [factor * d_act, act * d_factor][: z.shape[1]]
    record = formulas.activate(z, np.ones_like(z[:, :1]), activation, own)
    found = activate_backward(fp64(z), fp64(np.ones_like(z[:, :1])), activation, own)
    for golden in ((y1[:, None], np.stack(dz, 1)), record):
        for got, wanted in zip(found, golden, strict=True):
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert np.array_equal(activate(fp64(z), activation, own).numpy(), found[0].numpy())


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

    @pytest.mark.parametrize("beta", [2.0**-127, 1.5 * 2.0**126], ids=["low", "high"])
    def test_a_number_whose_inverse_fp32_has_not_is_refused(self, beta):
        with pytest.raises(ConfigError, match="beta"):
            layer_parameters(SITU, {"beta": beta})


@pytest.mark.parametrize(
    ("table", "activation"), [("_UNGATED", ActivationType.SILU), ("_GATES", OAI)], ids=str
)
def test_a_record_without_a_formula_is_a_clear_error(monkeypatch, table, activation):
    monkeypatch.delitem(getattr(activations, table), activation)
    words = f"{activation.value!r} has a record and no tensor formula"
    with pytest.raises(ConfigError, match=words):
        activate(fp32([[1.0, 2.0]]), activation)
