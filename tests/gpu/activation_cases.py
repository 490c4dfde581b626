"""What the activations of GPU tests are tried with: their definitions, and how large z must be."""

from __future__ import annotations

import functools

import torch
from oracle.golden import GAINS
from torch.nn.functional import gelu, relu, silu

from sonicmoe.enums import ACTIVATIONS, ActivationType

Tensor = torch.Tensor


def gated(activation: ActivationType, gate: Tensor, up: Tensor, own: tuple = ()) -> Tensor:
    """y1 by the definition of an activation that engine `hopper` has."""
    values = ACTIVATIONS[activation].values(own)
    if activation is ActivationType.SWIGLU_OAI:
        alpha, limit = values["alpha"], values["limit"]
        bounded = gate.clamp(max=limit)
        return bounded * torch.sigmoid(alpha * bounded) * (up.clamp(-limit, limit) + 1.0)
    if activation is ActivationType.SWIGLU_CLAMP:
        limit = values["limit"]
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if activation is ActivationType.SITU_GLU:
        beta, cap = values["beta"], values["linear_beta"]
        factor = up if cap == float("inf") else cap * torch.tanh(up / cap)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * factor
    functions = {
        "swiglu": silu,
        "geglu": gelu,
        "geglu_tanh": functools.partial(gelu, approximate="tanh"),
        "reglu": relu,
    }
    return functions[activation.value](gate) * up


def gain_of(activation: ActivationType) -> float:
    """The standard deviation of z."""
    return GAINS.get(activation.value, 1.0)
