"""The activations and their derivatives in fp32, on the native interleaved pre-activation `z`.

Gated: `z [rows, 2I]` holds (gate_i, up_i) pairs. Ungated: `z [rows, I]`. `enums.ACTIVATIONS` has
the formula and the source of each. A gated activation whose record names a `base` needs no entry
here, because it is `base(gate) * up`.

Gradients are zero beyond a clamp's bound and pass at the bound itself, as those of `torch.clamp`.
The slope at a kink is 0. NaN in, NaN out. Infinities have the limit of the formula where it has
one: a clamp or a softcap bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..enums import ACTIVATIONS, ActivationParameters, ActivationType, is_glu
from ..errors import ConfigError

Tensor = torch.Tensor
Values = Mapping[str, float]  # every parameter of the activation by name
# y1 is a value of gate times a factor of up. The value and its slope by gate; the factor and its
# slope by up.
GateParts = tuple[Tensor, Tensor, Tensor, Tensor | float]

_INV_SQRT2 = 1.0 / math.sqrt(2.0)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_TWO_SQRT_2_OVER_PI = 2.0 * math.sqrt(2.0 / math.pi)


def pre_activation_width(intermediate_size: int, activation: ActivationType) -> int:
    """Columns of `z`: 2I for gated activations, else I."""
    return 2 * intermediate_size if is_glu(activation) else intermediate_size


def activate(
    z: Tensor, activation: ActivationType, parameters: ActivationParameters = ()
) -> Tensor:
    """`y1` from fp32 `z`; `parameters` has those that the layer sets."""
    if not is_glu(activation):
        return value_and_slope(z, activation, parameters)[0]
    value, _, factor, _ = _gate(*split_gate_up(z), activation, parameters)
    return value * factor


def activate_backward(
    z: Tensor, dy1: Tensor, activation: ActivationType, parameters: ActivationParameters = ()
) -> tuple[Tensor, Tensor]:
    """`(y1, dz)` from fp32 `z` and the gradient of `y1`; `dz` has the layout of `z`."""
    if not is_glu(activation):
        value, slope = value_and_slope(z, activation, parameters)
        return value, dy1 * slope
    value, slope, factor, factor_slope = _gate(*split_gate_up(z), activation, parameters)
    return value * factor, merge_gate_up(dy1 * factor * slope, dy1 * value * factor_slope)


def split_gate_up(z: Tensor) -> tuple[Tensor, Tensor]:
    """Interleaved `[rows, 2I]` -> gate `[rows, I]`, up `[rows, I]`."""
    pairs = z.reshape([int(z.shape[0]), int(z.shape[1]) // 2, 2])
    return pairs[..., 0], pairs[..., 1]


def merge_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Inverse of `split_gate_up`."""
    return torch.stack([gate, up], -1).reshape([int(gate.shape[0]), 2 * int(gate.shape[1])])


def value_and_slope(
    x: Tensor, activation: ActivationType, parameters: ActivationParameters = ()
) -> tuple[Tensor, Tensor]:
    """`act(x)` and `act'(x)` of an ungated activation. ValueError where it is gated, ConfigError
    where it has no formula here.
    """
    record = ACTIVATIONS[activation]
    if record.gated:
        raise ValueError(f"{activation.value} is gated; split it first")
    return _entry(_UNGATED, activation)(x, record.values(parameters))


def _gate(
    gate: Tensor, up: Tensor, activation: ActivationType, parameters: ActivationParameters
) -> GateParts:
    # The record decides: gates of the form `base(gate) * up` need no entry in `_GATES`.
    base, values = ACTIVATIONS[activation].base, ACTIVATIONS[activation].values(parameters)
    if base is None:
        return _entry(_GATES, activation)(gate, up, values)  # type: ignore[no-any-return]
    return *value_and_slope(gate, base, tuple(values.items())), up, 1.0


def _entry(table: Mapping[ActivationType, Any], key: ActivationType) -> Any:
    # The record of an activation alone does not teach the reference engine to compute it.
    if key not in table:
        raise ConfigError(
            f"activation {key.value!r} has a record and no tensor formula: add it to "
            "engine/activations.py, or name its base in the record"
        )
    return table[key]


# ---- ungated: (act(x), act'(x)) ----


def _silu(x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    # d/dx (x s) = s + x s (1 - s), with s' = s (1 - s).
    sigma = torch.sigmoid(x)
    return x * sigma, sigma * (1.0 + x * (1.0 - sigma))


def _gelu(x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    # The exact form with erf and not the tanh approximation. The derivative of phi is the normal
    # density.
    phi = 0.5 * (1.0 + torch.erf(x * _INV_SQRT2))
    return x * phi, phi + x * torch.exp(-0.5 * x * x) * _INV_SQRT_2PI


def _gelu_tanh(x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    # (1 + tanh(u)) / 2 = sigmoid(2 u) keeps its digits where tanh(u) is close to -1.
    square = (x * x).clamp(max=1e4)  # sigma is 0 or 1 there, and the cube must not overflow
    sigma = torch.sigmoid(_TWO_SQRT_2_OVER_PI * x * (1.0 + 0.044715 * square))
    value = x * sigma
    inner = _TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * square)  # d(2 u) / dx
    return value, sigma + value * (1.0 - sigma) * inner


def _relu(x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    # x * 0 keeps NaN: the comparison alone would give it a slope of 0.
    return _positive(x), (x > 0.0).to(x.dtype) + x * 0.0


def _relu_sq(x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    positive = _positive(x)
    return positive * positive, 2.0 * positive


def _positive(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    # The second term keeps NaN alive where a framework's clamp drops it.
    return x.clamp(min=0.0) + x * 0.0


_UNGATED = {
    ActivationType.SILU: _silu,
    ActivationType.GELU: _gelu,
    ActivationType.GELU_TANH: _gelu_tanh,
    ActivationType.RELU: _relu,
    ActivationType.RELU_SQ: _relu_sq,
}

# ---- gates that are not `base(gate) * up` ----


def _swiglu_oai(gate: Tensor, up: Tensor, values: Values) -> GateParts:
    factor, slope = _clamped_up(up, values["limit"])
    return *_clamped_swish(gate, values["alpha"], values["limit"]), factor + 1.0, slope


def _swiglu_clamp(gate: Tensor, up: Tensor, values: Values) -> GateParts:
    # SiLU is the swish with an alpha of 1.
    limit = values["limit"]
    return *_clamped_swish(gate, 1.0, limit), *_clamped_up(up, limit)


def _situ_glu(gate: Tensor, up: Tensor, values: Values) -> GateParts:
    # c(gate) s(gate) of a softcap c, and s' = s (1 - s).
    capped, capped_slope = _softcap(gate, values["beta"])
    sigma = torch.sigmoid(gate)
    value, slope = capped * sigma, capped_slope * sigma + capped * sigma * (1.0 - sigma)
    return value, slope, *_softcap(up, values["linear_beta"])


def _clamped_swish(gate: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    """`c * sigmoid(alpha * c)` of `c = min(gate, limit)`, and its derivative by `gate`."""
    clamped = _clamped(gate, limit, both=False)
    sigma = torch.sigmoid(alpha * clamped)
    value = clamped * sigma
    # A bound passes no gradient beyond it. A factor, not a choice: NaN times 0 is NaN.
    passes = (gate <= limit).to(gate.dtype)
    return value, (sigma + alpha * value * (1.0 - sigma)) * passes


def _clamped_up(up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`clamp(up, -limit, limit)` and its derivative."""
    return _clamped(up, limit, both=True), (up.abs() <= limit).to(up.dtype)


def _clamped(x: Tensor, bound: float, *, both: bool) -> Tensor:
    """`min(x, bound)`, and `max` of that and `-bound` when `both`."""
    # It chooses element by element, because a framework's clamp may drop NaN.
    limit = torch.full_like(x, bound)
    below = torch.where(x > limit, limit, x)
    return torch.where(below < -limit, -limit, below) if both else below


def _softcap(x: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """`bound * tanh(x / bound)` and its derivative; x itself under an infinite bound."""
    if bound == math.inf:
        return x, torch.ones_like(x)
    scaled = x / bound
    # 1 - tanh(s)^2, which would be all rounding error where tanh is close to 1.
    slope = 4.0 * torch.sigmoid(2.0 * scaled) * torch.sigmoid(-2.0 * scaled)
    return bound * torch.tanh(scaled), slope


_GATES = {
    ActivationType.SWIGLU_OAI: _swiglu_oai,
    ActivationType.SWIGLU_CLAMP: _swiglu_clamp,
    ActivationType.SITU_GLU: _situ_glu,
}
