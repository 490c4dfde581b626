"""What the activations of GPU tests are tried with: their definitions, how large z must be, and the
parameters that a layer sets.
"""

from __future__ import annotations

import functools

import torch
from oracle.golden import GAINS
from torch.nn.functional import gelu, relu, silu

from sonicmoe.enums import ACTIVATIONS, ActivationType

Tensor = torch.Tensor

# Every parameter of an activation away from its default. At these z lies on both sides of a limit,
# and where tanh bends.
OWN = {
    ActivationType.SWIGLU_OAI: (("alpha", 1.1), ("limit", 3.0)),
    ActivationType.SWIGLU_CLAMP: (("limit", 2.5),),
    ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 2.5)),
}


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
