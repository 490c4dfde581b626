"""The activations and their derivatives in fp32, on the native interleaved pre-activation `z`.

Gated: `z [rows, 2I]` holds (gate_i, up_i) pairs, `y1 = act(gate) * up`. Ungated: `z [rows, I]`, `y1
= act(z)`. GELU is the tanh approximation's exact parent, `x * Phi(x)` (Hendrycks and Gimpel,
arXiv:1606.08415); GLU variants follow Shazeer (arXiv:2002.05202). GPT-OSS's (arXiv:2508.10925)
clamps both halves and adds 1 to up; gradients are zero beyond a clamp's bound and pass at the bound
itself, as `torch.clamp`'s. NaN in, NaN out.
"""

from __future__ import annotations

import math

import torch

from ..enums import ActivationType, is_glu

Tensor = torch.Tensor

SWIGLU_OAI_ALPHA = 1.702  # GPT-OSS's `swiglu_alpha` and `swiglu_limit`
SWIGLU_OAI_LIMIT = 7.0

_INV_SQRT2 = 1.0 / math.sqrt(2.0)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)

_BASE = {
    ActivationType.SWIGLU: ActivationType.SILU,
    ActivationType.GEGLU: ActivationType.GELU,
    ActivationType.REGLU: ActivationType.RELU,
}


def pre_activation_width(intermediate_size: int, activation: ActivationType) -> int:
    """Columns of `z`: 2I for gated activations, else I."""
    return 2 * intermediate_size if is_glu(activation) else intermediate_size


def activate(z: Tensor, activation: ActivationType) -> Tensor:
    """`y1` from fp32 `z`."""
    if is_glu(activation):
        gate, up = split_gate_up(z)
        if activation is ActivationType.SWIGLU_OAI:
            return _clamped_value_and_slope(gate)[0] * (_clamped(up, both=True) + 1.0)
        return value_and_slope(gate, _BASE[activation])[0] * up
    return value_and_slope(z, activation)[0]


def activate_backward(z: Tensor, dy1: Tensor, activation: ActivationType) -> tuple[Tensor, Tensor]:
    """`(y1, dz)` from fp32 `z` and the gradient of `y1`; `dz` has the layout of `z`."""
    if not is_glu(activation):
        value, slope = value_and_slope(z, activation)
        return value, dy1 * slope
    gate, up = split_gate_up(z)
    if activation is ActivationType.SWIGLU_OAI:
        return _swiglu_oai_backward(gate, up, dy1)
    value, slope = value_and_slope(gate, _BASE[activation])
    return value * up, merge_gate_up(dy1 * up * slope, dy1 * value)


def split_gate_up(z: Tensor) -> tuple[Tensor, Tensor]:
    """Interleaved `[rows, 2I]` -> gate `[rows, I]`, up `[rows, I]`."""
    pairs = z.reshape([int(z.shape[0]), int(z.shape[1]) // 2, 2])
    return pairs[..., 0], pairs[..., 1]


def merge_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Inverse of `split_gate_up`."""
    return torch.stack([gate, up], -1).reshape([int(gate.shape[0]), 2 * int(gate.shape[1])])


def value_and_slope(x: Tensor, activation: ActivationType) -> tuple[Tensor, Tensor]:
    """`act(x)` and `act'(x)` of an ungated activation; the slope at a kink is 0."""
    if activation is ActivationType.SILU:
        sigma = torch.sigmoid(x)
        return x * sigma, sigma * (1.0 + x * (1.0 - sigma))
    if activation is ActivationType.GELU:
        phi = 0.5 * (1.0 + torch.erf(x * _INV_SQRT2))
        return x * phi, phi + x * torch.exp(-0.5 * x * x) * _INV_SQRT_2PI
    positive = (
        x.clamp(min=0.0) + x * 0.0
    )  # the second term keeps NaN alive where a framework's clamp drops it
    step = (x > 0.0).to(x.dtype)
    if activation is ActivationType.RELU:
        return positive, step + x * 0.0
    if activation is ActivationType.RELU_SQ:
        return positive * positive, 2.0 * positive
    raise ValueError(f"{activation} is gated; split it first")


def _swiglu_oai_backward(gate: Tensor, up: Tensor, dy1: Tensor) -> tuple[Tensor, Tensor]:
    """`(y1, dz)` of GPT-OSS's gate."""
    value, slope = _clamped_value_and_slope(gate)
    factor = _clamped(up, both=True) + 1.0
    passes = (up.abs() <= SWIGLU_OAI_LIMIT).to(up.dtype)
    return value * factor, merge_gate_up(dy1 * factor * slope, dy1 * value * passes)


def _clamped_value_and_slope(gate: Tensor) -> tuple[Tensor, Tensor]:
    """`c * sigmoid(alpha * c)` of `c = min(gate, limit)`, and its derivative by `gate`."""
    clamped = _clamped(gate, both=False)
    sigma = torch.sigmoid(SWIGLU_OAI_ALPHA * clamped)
    value = clamped * sigma
    passes = (gate <= SWIGLU_OAI_LIMIT).to(gate.dtype)  # a factor, not a choice: NaN times 0 is NaN
    return value, (sigma + SWIGLU_OAI_ALPHA * value * (1.0 - sigma)) * passes


def _clamped(x: Tensor, *, both: bool) -> Tensor:
    """`min(x, limit)`, and `max` of that and `-limit` when `both`; a choice, since a framework's
    clamp may drop NaN.
    """
    limit = torch.full_like(x, SWIGLU_OAI_LIMIT)
    below = torch.where(x > limit, limit, x)
    return torch.where(below < -limit, -limit, below) if both else below
