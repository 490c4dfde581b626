"""The device code of the activations of the GEMMs for Hopper, compiled for the host and compared with
fp64: what the epilogues get from a struct of `activations.cuh`, in both of their units.

The host has other instructions for exp2 and the reciprocal, a little more exact than the GPU's.
"""

from __future__ import annotations

import ctypes
import re
import shutil

import kept
import numpy as np
import pytest
from oracle.golden import base_of, slope, up_factor, value
from worlds import ROOT

from sonicmoe.enums import ActivationType
from sonicmoe.kernels.sm90 import launch_parameters

HEADER = ROOT / "sonicmoe/kernels/sm90/activations.cuh"
SITU, CLAMP = ActivationType.SITU_GLU, ActivationType.SWIGLU_CLAMP
OAI = ActivationType.SWIGLU_OAI
BOUNDED = SITU, CLAMP, OAI
CASES = {
    "swiglu": (ActivationType.SWIGLU, "Silu", {}),
    "geglu": (ActivationType.GEGLU, "Gelu", {}),
    "geglu_tanh": (ActivationType.GEGLU_TANH, "GeluTanh", {}),
    "reglu": (ActivationType.REGLU, "Relu", {}),
    "clamp": (CLAMP, "ClampedSilu", {}),
    "clamp at 2.5": (CLAMP, "ClampedSilu", {"limit": 2.5}),
    "situ": (SITU, "Situ", {}),
    "situ of Fleet": (SITU, "Situ", {"beta": 4.0, "linear_beta": 25.0}),
    "situ of small bounds": (SITU, "Situ", {"beta": 0.1, "linear_beta": 0.3}),
    "situ of large bounds": (SITU, "Situ", {"beta": 2.0**126, "linear_beta": 1e30}),
    "oai": (OAI, "Oai", {}),
    "oai of other numbers": (OAI, "Oai", {"alpha": 1.1, "limit": 2.5}),
    # Of the BF16 GEMMs alone.
    "relu_sq": (ActivationType.RELU_SQ, "SquaresBesideUp", {}),
}
SHIM = """
#include <cmath>
#include <cstdint>
#define __device__
#define __forceinline__ inline
static float reciprocal(float x) { return 1.f / x; }
static float exp2_approx(float x) { return exp2f(x); }
static float at_most(float x, float bound) { return x > bound ? bound : x; }
static float at_least(float x, float bound) { return x < bound ? bound : x; }
"""
# As the epilogues do it: forward on z, backward on 8-bit codes and their scale.
EVALUATE = """
// What has no gate, and reads z in its own units.
struct SquaresBesideUp : SquaredRelu, BoundedUp {
  static float up_value(float u) { return u; }
  static void up_both(float u, float& value, float& slope) { PlainUp::up_both(u, value, slope); }
};
extern "C" const char* parameters() { return GATE::kParameters; }
template <class Gate>
void run(const Gate& gate, int n, float scale, const float* code, const float* up, float* out) {
  for (int i = 0; i < n; ++i) {
    const float unit = Gate::kBoundsUp ? 1.f : scale;
    const float c = Gate::kBoundsUp ? code[i] * scale : code[i];
    const float u = Gate::kBoundsUp ? up[i] * scale : up[i];
    float value, slope, factor, factor_slope;
    gate.both(c, unit, Gate::kArgument * unit, value, slope);
    gate.up_both(u, factor, factor_slope);
    out[5 * i] = gate.value(code[i] * scale) * gate.up_value(up[i] * scale);
    out[5 * i + 1] = value * unit;
    out[5 * i + 2] = slope;
    out[5 * i + 3] = factor * unit;
    out[5 * i + 4] = factor_slope;
  }
}
template <class Gate, class Launch>
void with(double first, double second, Launch launch) {
  if constexpr (*Gate::kParameters == 0) launch(Gate{});
  else Gate::with(first, second, launch);
}
extern "C" void evaluate(double first, double second, int n, float scale, const float* code,
                         const float* up, float* out) {
  with<GATE>(first, second, [&](const auto& gate) { run(gate, n, scale, code, up, out); });
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module", params=CASES)
def case(request, artefacts):
    """`(activation, parameters, evaluate(code, up, scale) -> y1, value, slope, factor, its slope)`."""
    activation, gate, own = CASES[request.param]
    text = HEADER.read_text(encoding="utf-8")
    (structs,) = re.findall(r"^namespace sonicmoe::sm90 \{\n(.*?)^\}  // ", text, re.M | re.S)
    flags = "-std=c++17", "-O1", f"-DGATE={gate}"
    library = kept.shared_object(artefacts, "gate", SHIM + structs + EVALUATE, *flags)
    loaded = ctypes.CDLL(str(library))
    loaded.parameters.restype = ctypes.c_char_p
    exported = [f"{activation.value} {loaded.parameters().decode()}"]
    _, *numbers = launch_parameters(exported, activation, tuple(own.items()))

    def evaluate(code, up, scale):
        code, up = (np.ascontiguousarray(a, np.float32).ravel() for a in (code, up))
        out = np.empty((code.size, 5), np.float32)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (code, up, out)]
        given = *map(ctypes.c_double, numbers), code.size, ctypes.c_float(scale)
        loaded.evaluate(*given, *pointers)
        return out.astype(np.float64).T

    return activation, own, evaluate


@pytest.mark.parametrize("scale", [1e-3, 0.03, 0.25])
def test_against_fp64(case, scale):
    """Every pair of 8-bit codes: |z| up to 0.13, 3.8 and 32."""
    activation, own, evaluate = case
    codes = np.arange(-127, 128)
    gate, up = (grid.ravel() for grid in np.meshgrid(codes, codes, indexing="ij"))
    y1, values, slopes, factors, factor_slopes = evaluate(gate, up, scale)
    # The product that the kernel forms, in fp32.
    z = (codes.astype(np.float32) * np.float32(scale)).astype(np.float64)
    act, d_act = (
        np.repeat(f(base_of(activation.value), z, tuple(own.items())), 255) for f in (value, slope)
    )
    factor, d_factor = (np.tile(f, 255) for f in up_factor(activation.value, z, tuple(own.items())))
    # GELU's normal distribution is off by 8e-8 of z.
    reach = 127 * scale if activation is ActivationType.GEGLU else 0.0
    close = {"rtol": 2.0**-19, "atol": 3e-7 * (1.0 + reach)}
    np.testing.assert_allclose(values, act, **close)
    np.testing.assert_allclose(slopes, d_act, **close)
    np.testing.assert_allclose(factors, factor, **close)
    np.testing.assert_allclose(factor_slopes, d_factor, rtol=2.0**-18, atol=1e-12)
    np.testing.assert_allclose(y1, act * factor, rtol=2.0**-18, atol=2e-7 * (scale + reach**2))


@pytest.mark.parametrize(
    "case", [name for name, (*_, own) in CASES.items() if "linear_beta" in own], indirect=True
)
def test_softcaps_keep_relative_accuracy(case):
    """Towards 0 and where tanh is flat, on both sides: no slope is a rounding error."""
    _, own, evaluate = case
    cap = own["linear_beta"]
    u = cap * np.concatenate([np.logspace(-6, 1, 500), -np.logspace(-6, 1, 500)])
    u = np.clip(u, -1e37, 1e37).astype(np.float32)
    _, _, _, factors, slopes = evaluate(np.ones_like(u), u, 1.0)
    exact = u.astype(np.float64) / cap
    np.testing.assert_allclose(factors, cap * np.tanh(exact), rtol=2.0**-19)
    np.testing.assert_allclose(slopes, np.cosh(exact) ** -2.0, rtol=2.0**-17)


def test_large_values_and_nan(case):
    activation, own, evaluate = case
    big = np.array([1e4, 3e38, np.inf], np.float32)
    if activation in BOUNDED and max(own.values(), default=1.0) < 1e4:
        _, values, slopes, factors, factor_slopes = evaluate(
            np.r_[big, -big[:2]], np.r_[big, -big[:2]], 1.0
        )
        np.testing.assert_allclose(values[3:], 0.0)
        # There every one of these bounds is met, and fp64 still has the exponentials.
        top = value(base_of(activation.value), 200.0, tuple(own.items()))
        np.testing.assert_allclose(values[:3], top, rtol=1e-6)
        assert not slopes.any()
        if activation is not SITU or "linear_beta" in own:
            (most, least), _ = up_factor(
                activation.value, np.array([200.0, -200.0]), tuple(own.items())
            )
            np.testing.assert_allclose(factors, [most] * 3 + [least] * 2, rtol=1e-6)
            assert not factor_slopes.any()
    nan, one = np.array([np.nan], np.float32), np.ones(1, np.float32)
    assert np.isnan(evaluate(nan, one, 1.0)[0]).all() and np.isnan(evaluate(one, nan, 1.0)[0]).all()
    # z in bf16 may be NaN in backward too.
    _, values, slopes, *_ = evaluate(nan, one, 1.0)
    assert np.isnan(values).all() and np.isnan(slopes).all()
    # 8-bit codes are numbers, and the scale of a row may be none.
    y1, values, *rest = evaluate(one, one, np.nan)
    assert np.isnan(y1).all() and np.isnan(values).all()
    if activation in BOUNDED:
        assert np.isnan(rest[0]).all(), "the slope of the gate"
