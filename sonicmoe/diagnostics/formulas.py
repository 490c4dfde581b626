"""The formula of an activation's record, evaluated in fp64 with its derivative: the golden of
`bisect`, of the self-test and of every measured error.

It shares no code with any engine. Derivatives follow from the text by dual numbers: every value
carries its derivative by one of the inputs, and every operation applies its rule to both.
numpy only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..enums import ACTIVATIONS, Activation, ActivationParameters, ActivationType, is_glu

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Dual:
    """A value and its derivative by one input."""

    value: Any
    slope: Any

    def __add__(self, other: Any) -> Dual:
        other = _dual(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other: Any) -> Dual:
        other = _dual(other)
        slope = self.slope * other.value + self.value * other.slope
        return Dual(self.value * other.value, slope)

    def __truediv__(self, other: Any) -> Dual:
        other = _dual(other)
        quotient = self.value / other.value
        return Dual(quotient, (self.slope - quotient * other.slope) / other.value)

    def __pow__(self, exponent: int) -> Dual:
        return Dual(self.value**exponent, exponent * self.value ** (exponent - 1) * self.slope)

    def __neg__(self) -> Dual:
        return self * -1.0

    def __sub__(self, other: Any) -> Dual:
        return self + -_dual(other)

    def __rsub__(self, other: Any) -> Dual:
        return _dual(other) - self

    def __rtruediv__(self, other: Any) -> Dual:
        return _dual(other) / self

    __radd__ = __add__
    __rmul__ = __mul__


def _dual(value: Any) -> Dual:
    return value if isinstance(value, Dual) else Dual(value, 0.0)


# The chain rule: the derivative of f(x) is f'(x) times the slope that x brings along.
def _elementwise(
    value: Callable[[Any], Any], slope: Callable[[Any, Any], Any]
) -> Callable[[Any], Dual]:
    """A function of one argument from its value at x, and its derivative from x and that value."""

    def apply(x: Any) -> Dual:
        x = _dual(x)
        found = value(x.value)
        return Dual(found, slope(x.value, found) * x.slope)

    return apply


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))  # exp must not overflow; it is 0 or 1 there


# The slopes at kinks are conventions, and those of the engines (see `engine.activations`).
def _max(x: Any, bound: Any) -> Dual:
    """The slope at the kink is 0."""
    x, bound = _dual(x), _dual(bound).value
    return Dual(np.maximum(x.value, bound), x.slope * (x.value > bound))


def _min(x: Any, bound: Any) -> Dual:
    """A bound: gradients pass at it and vanish beyond it."""
    x, bound = _dual(x), _dual(bound).value
    return Dual(np.minimum(x.value, bound), x.slope * (x.value <= bound))


def _clamp(x: Any, low: Any, high: Any) -> Dual:
    """Two bounds, each as that of `min`."""
    x, low, high = _dual(x), _dual(low).value, _dual(high).value
    inside = (x.value >= low) & (x.value <= high)
    return Dual(np.clip(x.value, low, high), x.slope * inside)


_tanh = _elementwise(np.tanh, lambda _, t: 1 - t * t)


def _softcap(x: Any, bound: Any) -> Dual:
    """`bound * tanh(x / bound)`, and x itself under an infinite bound."""
    bound = _dual(bound).value
    return _dual(x) if bound == math.inf else _tanh(_dual(x) / bound) * bound


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": _max,
    "min": _min,
    "clamp": _clamp,
    "sigmoid": _elementwise(_sigmoid, lambda _, s: s * (1 - s)),
    "exp": _elementwise(np.exp, lambda _, e: e),
    "tanh": _tanh,
    "softcap": _softcap,
    "log1p": _elementwise(np.log1p, lambda x, _: 1 / (1 + x)),
    "erf": _elementwise(
        np.vectorize(math.erf, otypes=[np.float64]),
        lambda x, _: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    ),
    "sqrt": math.sqrt,
}


def activate(
    z: Array, dy1: Array, activation: ActivationType, parameters: ActivationParameters = ()
) -> tuple[Array, Array]:
    """`(y1, dz)` of native z (gate and up interleaved), from the formula of the record."""
    if not is_glu(activation):
        y1, slopes = value_and_gradients(activation, parameters, x=z)
        return y1, dy1 * slopes["x"]
    y1, slopes = value_and_gradients(activation, parameters, gate=z[:, 0::2], up=z[:, 1::2])
    dz = np.empty_like(z)
    dz[:, 0::2], dz[:, 1::2] = dy1 * slopes["gate"], dy1 * slopes["up"]
    return y1, dz


def value_and_gradients(
    activation: ActivationType, parameters: ActivationParameters, **inputs: Array
) -> tuple[Array, dict[str, Array]]:
    """`(y1, dy1/d(input) by the input's name)` from `x`, or from `gate` and `up`."""
    y1, gradients = np.zeros(0), {}
    for name, array in inputs.items():
        # One pass per input: the input that is differentiated by starts with slope 1, the others
        # with 0.
        seeded = {other: Dual(given, float(other == name)) for other, given in inputs.items()}
        found = _evaluate(ACTIVATIONS[activation], parameters, seeded)
        y1, gradients[name] = found.value, found.slope * np.ones_like(array)
    return y1, gradients


def _evaluate(record: Activation, parameters: ActivationParameters, inputs: dict[str, Any]) -> Dual:
    # Gated formulas may name an ungated activation, for example silu(gate) * up.
    bases = {
        activation.value: functools.partial(_apply_base, base, parameters)
        for activation, base in ACTIVATIONS.items()
        if not base.gated
    }
    # Formulas are written in this package. They see the names listed here and nothing else, so a
    # misspelt name raises instead of finding a builtin.
    names = {**_FUNCTIONS, **bases, **record.values(parameters), **inputs, "__builtins__": {}}
    return _dual(eval(_compiled(record.formula), names))


def _apply_base(record: Activation, parameters: ActivationParameters, x: Any) -> Dual:
    own = record.values()
    # A base takes the parameters that it has itself, and its defaults for the rest.
    shared = tuple((name, value) for name, value in parameters if name in own)
    return _evaluate(record, shared, {"x": x})


@functools.cache
def _compiled(formula: str) -> Any:
    return compile(formula, f"<formula {formula}>", "eval")
