"""Where the Triton GEMMs leave weight gradients: at which addresses and strides.

They write through strides, so every layout of the parameters serves: stacked or a tensor per expert,
transposed or not, gate and up in turns or apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ConfigError
from ..interop import device_of
from .gradient_memory import Place, WeightTarget
from .targets import FreshTargets, GradientTargets, NativeBuffer, ParameterTargets

Tensor = torch.Tensor


class Places(NamedTuple):
    """Of both projections, as `kernels.triton.launches.Place`; None: nobody wants that gradient."""

    dw1: Any
    dw2: Any


def places(targets: GradientTargets, calls: Any) -> Places:
    """Those of targets; ConfigError names the reason for which the GEMMs cannot add there. `calls`:
    the launches of the model.
    """
    # Triton is loaded: `calls` is of this module.
    from ..kernels.triton import launches

    if isinstance(targets, NativeBuffer):
        return Places(
            launches.native_place("wgrad_up", calls, targets.dw1),
            launches.native_place("wgrad_down", calls, targets.dw2),
        )
    if not isinstance(targets, ParameterTargets):
        raise ConfigError(f"gradient targets are {type(targets).__name__}")
    adds = not isinstance(targets, FreshTargets)
    # Memory that was made for this backward overlaps nothing.
    problem = problem_of(targets) if adds else _stride_problem(targets)
    if problem is not None:
        raise ConfigError(f"the Triton GEMMs cannot add to these parameters: {problem}")
    return Places(
        _place(targets.up, calls.shape.parts, adds, launches),
        _place(targets.down, 1, adds, launches),
    )


def problem_of(targets: ParameterTargets) -> str | None:
    """Why the GEMMs cannot add to these parameters, once `ParameterTargets.problem` has found
    nothing: one sentence, or None.
    """
    return targets.once("triton", lambda: _problem_of(targets))


def _problem_of(targets: ParameterTargets) -> str | None:
    # The promise of 16 bytes is the copy engine's too, and so is that nothing overlaps.
    return targets.copy_engine_problem() or _stride_problem(targets)


def _stride_problem(targets: ParameterTargets) -> str | None:
    for name, weight in (("up", targets.up), ("down", targets.down)):
        # Addresses may differ, because a table has them. Strides are arguments of the launch.
        if len({place[1:] for place in _wanted(weight)}) > 1:
            return (
                f"the experts' {name}-projection gradients have different strides, and the Triton "
                "GEMMs take one for all"
            )
    return None


def _wanted(weight: WeightTarget) -> list[Place]:
    # Frozen experts have address 0, and no say in this.
    found = weight.places(weight.layout.split_half)
    return [place for place in found if place.address]


def _place(weight: WeightTarget, parts: int, adds: bool, launches: Any) -> Any:
    """Where the matrices of one projection lie, or None."""
    if not weight.is_wanted:
        return None
    tensor = next(tensor for tensor in weight.tensors if tensor is not None)
    apart = parts == 2 and weight.layout.split_half
    every = weight.places(apart)
    one = next(place for place in every if place.address)
    # Gate and up in turns: from a gate row it is one step to its up row, and two to the next.
    steps = (one.stride_part, one.stride_m) if apart else (one.stride_m, parts * one.stride_m)
    pitch, step_m = (steps[1], 0) if one.stride_n == 1 else (one.stride_n, steps[1])
    strides = (steps[0], pitch, step_m, int(tensor.element_size()))
    if weight.is_stacked:
        return launches.Place(tensor, int(tensor.stride()[-3]), *strides, adds=adds)
    # Launches fill the table: a copy from pageable memory would wait for the device.
    addresses = torch.empty((len(every),), dtype=torch.int64, device=device_of(tensor))
    for call in launches.addresses_calls(addresses, [place.address for place in every]):
        call.launch()
    return launches.Place(tensor, 0, *strides, addresses=addresses, adds=adds)
