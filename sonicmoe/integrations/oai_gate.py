"""GPT-OSS's gate, recognised by trying a class's own gate out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..engine.activations import activate_backward, merge_gate_up
from ..enums import ACTIVATIONS, ActivationType

Tensor = torch.Tensor

OAI = ActivationType.SWIGLU_OAI
OAI_DEFAULTS = ACTIVATIONS[OAI].values()
OAI_CONSTANTS = {  # under every name that classes with this gate use
    name: value for key, value in OAI_DEFAULTS.items() for name in (key, f"swiglu_{key}")
}


# torch.compile runs this while tracing and takes the answer as a constant: the trial of a gate is
# no part of the graph.
@torch.compiler.assume_constant_result
def has_oai_gate(kind: Any, split_half: bool) -> bool:
    """Whether the gate of this class is GPT-OSS's. It is tried out, because another class could
    have the same name and another formula.
    """
    return _equals_swiglu_oai(kind._apply_gate, split_half)


@functools.cache
def _equals_swiglu_oai(gate: Callable[..., Tensor], split_half: bool) -> bool:
    """Whether `gate` and the engine's formula agree, values and gradients, in fp32.

    The points lie on both sides of every bound of the clamps and on it, where two formulas that
    agree elsewhere may differ. The gate is called on a stand-in that has the constants and nothing
    else, so a gate that reads more of its module is refused.
    """
    bound = OAI_DEFAULTS["limit"]
    below, above = (-40.0, -3.0, -1.0, -0.1), (0.0, 0.3, 2.0, 40.0)
    ticks = *below, *above, -bound - 0.5, -bound, bound - 0.01, bound, bound + 0.01
    # The first call may come from inside a user's inference or autocast block. The comparison needs
    # gradients in fp32 all the same.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        points = torch.tensor(ticks, dtype=torch.float32, device="cpu")
        gates, ups = torch.meshgrid(points, points, indexing="ij")
        dy1 = torch.linspace(-1.0, 2.0, points.numel() ** 2, device="cpu", dtype=torch.float32)
        dy1 = dy1.view_as(gates)
        y1, dz = activate_backward(merge_gate_up(gates, ups), dy1, OAI)
        # The engine's gradient has gate and up in pairs; the gate of this class may want halves.
        if split_half:
            dz = torch.cat([dz[:, 0::2], dz[:, 1::2]], 1)
        # The gate gets z in the order of its class: halves, or pairs of gate and up.
        z = torch.cat([gates, ups], 1) if split_half else merge_gate_up(gates, ups)
        z.requires_grad_()
        try:
            found = gate(SimpleNamespace(**OAI_CONSTANTS), z)
            (gradient,) = torch.autograd.grad(found, z, dy1)
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            return False  # it reads something else of its module, or returns another shape
        same = functools.partial(torch.allclose, rtol=1e-5, atol=1e-6)
        return found.shape == y1.shape and same(found, y1) and same(gradient, dz)
