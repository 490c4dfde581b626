"""The activations and their derivatives as device functions, in fp32 and element by element.

The formulas, slopes at kinks and rules for NaN are those of `engine.activations`, which
`enums.ACTIVATIONS` names the sources of. `KIND` is a value of `ActivationType`; `P0` and `P1` are its
parameters in the order of its record, constants of the compiled code. An infinite one is written 0,
because 0 is no bound.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

# Globals that device functions read must be constants of Triton.
_INV_SQRT2 = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _positive(x):
    # A comparison is false for NaN, so NaN stays; the hardware's maximum would drop it.
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _at_most(x, BOUND: tl.constexpr):
    return tl.where(x > BOUND, BOUND, x)


@triton.jit
def _between(x, BOUND: tl.constexpr):
    below = tl.where(x > BOUND, BOUND, x)
    return tl.where(below < -BOUND, -BOUND, below)


@triton.jit
def _swish(x, ALPHA: tl.constexpr):
    # value, and slope by x: s' = alpha s (1 - s)
    sigma = tl.sigmoid(ALPHA * x)
    value = x * sigma
    return value, sigma + ALPHA * value * (1.0 - sigma)


@triton.jit
def _gelu(x):
    phi = 0.5 * (1.0 + tl.erf(x * _INV_SQRT2))
    return x * phi, phi + x * tl.exp(-0.5 * x * x) * _INV_SQRT_2PI


@triton.jit
def _gelu_tanh(x):
    # (1 + tanh(u)) / 2 = sigmoid(2 u). The bound keeps the cube from overflowing where sigma is flat.
    square = tl.minimum(x * x, 1e4)
    sigma = tl.sigmoid(_TWO_SQRT_2_OVER_PI * x * (1.0 + 0.044715 * square))
    value = x * sigma
    inner = _TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * square)
    return value, sigma + value * (1.0 - sigma) * inner


@triton.jit
def _relu(x):
    # The slope of NaN is NaN.
    return _positive(x), tl.where(x > 0.0, 1.0, tl.where(x <= 0.0, 0.0, x))


@triton.jit
def _relu_sq(x):
    positive = _positive(x)
    return positive * positive, 2.0 * positive


@triton.jit
def _tanh(x):
    # Close to 0 the difference of two numbers close to 1 would be all rounding error; the series
    # is exact to 4e-7 of its value up to 0.25.
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.25, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _softcap(x, BOUND: tl.constexpr):
    # value and slope; without a bound x itself
    if BOUND == 0.0:
        return x, tl.full(x.shape, 1.0, tl.float32)
    else:
        scaled = x * (1.0 / BOUND)
        slope = 4.0 * tl.sigmoid(2.0 * scaled) * tl.sigmoid(-2.0 * scaled)
        return BOUND * _tanh(scaled), slope


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """`act(x)` and `act'(x)` of an ungated activation."""
    if KIND == "silu":
        return _swish(x, 1.0)
    elif KIND == "gelu":
        return _gelu(x)
    elif KIND == "gelu_tanh":
        return _gelu_tanh(x)
    elif KIND == "relu":
        return _relu(x)
    else:
        tl.static_assert(KIND == "relu_sq", "an activation without a formula in Triton")
        return _relu_sq(x)


@triton.jit
def _gate(gate, up, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):
    # y1 = value * factor, the slope of value by gate, and that of factor by up.
    if KIND == "swiglu_oai":  # P0 alpha, P1 limit
        value, slope = _swish(_at_most(gate, P1), P0)
        # A factor and not a choice, because NaN times 0 is NaN.
        slope = slope * tl.where(gate <= P1, 1.0, 0.0)
        return value, slope, _between(up, P1) + 1.0, tl.where(tl.abs(up) <= P1, 1.0, 0.0)
    elif KIND == "swiglu_clamp":  # P0 limit
        value, slope = _swish(_at_most(gate, P0), 1.0)
        slope = slope * tl.where(gate <= P0, 1.0, 0.0)
        return value, slope, _between(up, P0), tl.where(tl.abs(up) <= P0, 1.0, 0.0)
    elif KIND == "situ_glu":  # P0 beta, P1 linear_beta
        capped, capped_slope = _softcap(gate, P0)
        sigma = tl.sigmoid(gate)
        value, slope = capped * sigma, capped_slope * sigma + capped * sigma * (1.0 - sigma)
        factor, factor_slope = _softcap(up, P1)
        return value, slope, factor, factor_slope
    else:  # base(gate) * up
        if KIND == "swiglu":
            value, slope = _swish(gate, 1.0)
        elif KIND == "geglu":
            value, slope = _gelu(gate)
        elif KIND == "geglu_tanh":
            value, slope = _gelu_tanh(gate)
        else:
            tl.static_assert(KIND == "reglu", "an activation without a formula in Triton")
            value, slope = _relu(gate)
        return value, slope, up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit
def gated_value(gate, up, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):
    """`y1` of a gated activation."""
    value, _, factor, _ = _gate(gate, up, KIND, P0, P1)
    return value * factor


@triton.jit
def gated_gradients(gate, up, dy1, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):
    """`(y1, dgate, dup)` of a gated activation from the gradient of y1."""
    value, slope, factor, factor_slope = _gate(gate, up, KIND, P0, P1)
    return value * factor, dy1 * factor * slope, dy1 * value * factor_slope
