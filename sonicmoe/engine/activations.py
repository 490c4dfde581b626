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
    gate, up = split_gate_up(z)
    # The record decides: gates of the form `base(gate) * up` need no entry in `_GATES`.
    base, values = ACTIVATIONS[activation].base, ACTIVATIONS[activation].values(parameters)
    if base is not None:
        return value_and_slope(gate, base, tuple(values.items()))[0] * up
    return _entry(_GATES, activation)[0](gate, up, values)


def activate_backward(
    z: Tensor, dy1: Tensor, activation: ActivationType, parameters: ActivationParameters = ()
) -> tuple[Tensor, Tensor]:
    """`(y1, dz)` from fp32 `z` and the gradient of `y1`; `dz` has the layout of `z`."""
    if not is_glu(activation):
        value, slope = value_and_slope(z, activation, parameters)
        return value, dy1 * slope
    gate, up = split_gate_up(z)
    base, values = ACTIVATIONS[activation].base, ACTIVATIONS[activation].values(parameters)
    if base is not None:
        value, slope = value_and_slope(gate, base, tuple(values.items()))
        return value * up, merge_gate_up(dy1 * up * slope, dy1 * value)
    y1, dgate, dup = _entry(_GATES, activation)[1](gate, up, dy1, values)
    return y1, merge_gate_up(dgate, dup)


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

# ---- gates that are not `base(gate) * up`: y1, and (y1, dgate, dup) from dy1 ----


def _swiglu_oai(gate: Tensor, up: Tensor, values: Values) -> Tensor:
    return _clamped_swish(gate, values)[0] * (_clamped(up, values["limit"], both=True) + 1.0)


def _swiglu_oai_backward(
    gate: Tensor, up: Tensor, dy1: Tensor, values: Values
) -> tuple[Tensor, Tensor, Tensor]:
    value, slope = _clamped_swish(gate, values)
    # y1 = swish(min(gate, limit)) * (clamp(up) + 1). A bound passes no gradient beyond it, hence
    # the two factors `passes`, one of them in `_clamped_swish`.
    factor = _clamped(up, values["limit"], both=True) + 1.0
    passes = (up.abs() <= values["limit"]).to(up.dtype)
    return value * factor, dy1 * factor * slope, dy1 * value * passes


def _clamped_swish(gate: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """`c * sigmoid(alpha * c)` of `c = min(gate, limit)`, and its derivative by `gate`."""
    alpha, limit = values["alpha"], values["limit"]
    clamped = _clamped(gate, limit, both=False)
    sigma = torch.sigmoid(alpha * clamped)
    value = clamped * sigma
    passes = (gate <= limit).to(gate.dtype)  # a factor, not a choice: NaN times 0 is NaN
    return value, (sigma + alpha * value * (1.0 - sigma)) * passes


def _clamped(x: Tensor, bound: float, *, both: bool) -> Tensor:
    """`min(x, bound)`, and `max` of that and `-bound` when `both`."""
    # It chooses element by element, because a framework's clamp may drop NaN.
    limit = torch.full_like(x, bound)
    below = torch.where(x > limit, limit, x)
    return torch.where(below < -limit, -limit, below) if both else below


def _swiglu_clamp(gate: Tensor, up: Tensor, values: Values) -> Tensor:
    value, _ = _clamped_swish(gate, _as_swish(values))
    return value * _clamped(up, values["limit"], both=True)


def _swiglu_clamp_backward(
    gate: Tensor, up: Tensor, dy1: Tensor, values: Values
) -> tuple[Tensor, Tensor, Tensor]:
    value, slope = _clamped_swish(gate, _as_swish(values))
    factor = _clamped(up, values["limit"], both=True)
    passes = (up.abs() <= values["limit"]).to(up.dtype)
    return value * factor, dy1 * factor * slope, dy1 * value * passes


def _as_swish(values: Values) -> Values:
    # SiLU is the swish with an alpha of 1.
    return {**values, "alpha": 1.0}


def _situ_glu(gate: Tensor, up: Tensor, values: Values) -> Tensor:
    capped = _softcap(gate, values["beta"])[0] * torch.sigmoid(gate)
    return capped * _softcap(up, values["linear_beta"])[0]


def _situ_glu_backward(
    gate: Tensor, up: Tensor, dy1: Tensor, values: Values
) -> tuple[Tensor, Tensor, Tensor]:
    # y1 = c(gate) s(gate) b(up) of two softcaps c and b, and s' = s (1 - s).
    capped, capped_slope = _softcap(gate, values["beta"])
    sigma = torch.sigmoid(gate)
    value, slope = capped * sigma, capped_slope * sigma + capped * sigma * (1.0 - sigma)
    factor, factor_slope = _softcap(up, values["linear_beta"])
    return value * factor, dy1 * factor * slope, dy1 * value * factor_slope


def _softcap(x: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """`bound * tanh(x / bound)` and its derivative; x itself under an infinite bound."""
    if bound == math.inf:
        return x, torch.ones_like(x)
    scaled = x / bound
    # 1 - tanh(s)^2, which would be all rounding error where tanh is close to 1.
    slope = 4.0 * torch.sigmoid(2.0 * scaled) * torch.sigmoid(-2.0 * scaled)
    return bound * torch.tanh(scaled), slope


_GATES = {
    ActivationType.SWIGLU_OAI: (_swiglu_oai, _swiglu_oai_backward),
    ActivationType.SWIGLU_CLAMP: (_swiglu_clamp, _swiglu_clamp_backward),
    ActivationType.SITU_GLU: (_situ_glu, _situ_glu_backward),
}
