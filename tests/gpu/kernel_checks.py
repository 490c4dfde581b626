"""What the kernel tests share: outputs that must be written, the error of each block of 128 rows, fp64
arithmetic on rows of experts, and the definitions of activations.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch.nn.functional import gelu, relu, silu

from sonicmoe.enums import ACTIVATIONS, ActivationType
from sonicmoe.kernels.sm90 import launch_parameters
from sonicmoe.quant.reference import dequantize


def poisoned(shape, dtype):
    """Fresh memory that reads as NaN, or as the byte 0x7F."""
    if dtype in (torch.int8, torch.uint8):
        return torch.full(shape, 0x7F, dtype=dtype, device="cuda")
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def block_errors(actual, wanted):
    """Relative RMSE of each 128-row block; a block of zeros must be zero."""
    difference = (actual.double() - wanted).reshape(-1, 128, wanted.shape[1]).norm(dim=(1, 2))
    norm = wanted.reshape(-1, 128, wanted.shape[1]).norm(dim=(1, 2))
    return torch.where(norm > 0, difference / norm.clamp(min=1e-300), difference)


def gathered(tokens, routing):
    """Dequantised tokens in row order, zeros in padding rows."""
    token = routing.row_token[: int(routing.padded_offsets[-1])].long()
    return dequantize(tokens)[token.clamp(min=0)] * (token >= 0).unsqueeze(1)


def products(values, weights, routing):
    """fp64 `values[rows of e] @ weights[e]^T` for the rows of every expert, padding included."""
    weights, offsets = dequantize(weights).double(), routing.padded_offsets.tolist()
    result = torch.zeros((offsets[-1], weights.shape[1]), dtype=torch.float64, device="cuda")
    for e, (first, last) in enumerate(itertools.pairwise(offsets)):
        result[first:last] = values[first:last].double() @ weights[e].T
    return result


# z of unit scale reaches every bound, and no cap is off.
OF_UNIT_Z = {
    ActivationType.SWIGLU_CLAMP: (("limit", 1.5),),
    ActivationType.SWIGLU_OAI: (("limit", 1.5),),
    ActivationType.SITU_GLU: (("beta", 2.0), ("linear_beta", 2.5)),
}


def launched(activation, module):
    """The arguments by which the fused kernels know it: its number, and `OF_UNIT_Z`."""
    return launch_parameters(module.activation_names(), activation, OF_UNIT_Z.get(activation, ()))


def gated(
    activation: ActivationType, gate: torch.Tensor, up: torch.Tensor, own: tuple = ()
) -> torch.Tensor:
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
