"""Tests of kernels share these: outputs that must be written, the error of each block of 128 rows, fp64
arithmetic on rows of experts, and destinations of weight gradients. Activations are those of the reference
engine, which tests/engine compares with their definitions.
"""

from __future__ import annotations

import itertools

import torch

from sonicmoe.engine.gradient_places import GradientPlaces, wgrad_destination
from sonicmoe.engine.interface import GradientMode
from sonicmoe.enums import ActivationType
from sonicmoe.kernels.sm90 import launch_parameters
from sonicmoe.layouts import NATIVE
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


def added_to(module, sums):
    """The destination of accumulators `[E, M, N]`."""
    places = GradientPlaces.stacked(sums, len(sums), NATIVE)
    return wgrad_destination(places, module.wgrad_destination, GradientMode.NATIVE, parts=False)
