"""The seven activations and their derivatives in fp32, on the native interleaved pre-activation `z`.

Gated: `z [rows, 2I]` holds (gate_i, up_i) pairs, `y1 = act(gate) * up`. Ungated: `z [rows, I]`, `y1 = act(z)`.
GELU is the tanh approximation's exact parent, `x * Phi(x)` (Hendrycks and Gimpel, arXiv:1606.08415); GLU variants follow
Shazeer (arXiv:2002.05202). NaN in, NaN out.
"""

from __future__ import annotations

import math

import torch

from ..enums import ActivationType, is_glu

Tensor = torch.Tensor

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
        return value_and_slope(gate, _BASE[activation])[0] * up
    return value_and_slope(z, activation)[0]


def activate_backward(z: Tensor, dy1: Tensor, activation: ActivationType) -> tuple[Tensor, Tensor]:
    """`(y1, dz)` from fp32 `z` and the gradient of `y1`; `dz` has the layout of `z`."""
    if not is_glu(activation):
        value, slope = value_and_slope(z, activation)
        return value, dy1 * slope
    gate, up = split_gate_up(z)
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
    positive = x.clamp(min=0.0) + x * 0.0  # the second term keeps NaN alive where a framework's clamp drops it
    step = (x > 0.0).to(x.dtype)
    if activation is ActivationType.RELU:
        return positive, step + x * 0.0
    if activation is ActivationType.RELU_SQ:
        return positive * positive, 2.0 * positive
    raise ValueError(f"{activation} is gated; split it first")
