"""Where the Triton GEMMs leave weight gradients: at which addresses and strides.

They write through strides, so every layout of the parameters serves: stacked or a tensor per expert,
transposed or not, gate and up in turns or apart.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError
from ..interop import device_of
from .gradient_places import GradientPlaces, MatrixPlace
from .settings import GradientMode
from .targets import GradientTargets

Tensor = torch.Tensor


def outputs_of(targets: GradientTargets, calls: Any) -> tuple[Any, Any]:
    """The memory of dw1 and dw2 as a `kernels.triton.launches.GradientOutput`, None where nobody
    wants that gradient; ConfigError names the reason for which the GEMMs cannot leave them there.
    `calls`: the launches of the model.
    """
    adds = targets.mode is not GradientMode.FRESH
    # Memory that was made for this backward overlaps nothing.
    problem = problem_of(targets) if adds else _stride_problem(targets)
    if problem is not None:
        raise ConfigError(f"the Triton GEMMs cannot add to these parameters: {problem}")
    return _output(targets.up, calls.shape.parts, adds), _output(targets.down, 1, adds)


def problem_of(targets: GradientTargets) -> str | None:
    """Why the GEMMs cannot add to this memory: one sentence, or None."""
    # The promise of 16 bytes is the copy engine's too, and so is that nothing overlaps.
    found = targets.copy_engine_problem()
    return found or targets.once("triton", lambda: _stride_problem(targets))


def _stride_problem(targets: GradientTargets) -> str | None:
    for name, places in (("up", targets.up), ("down", targets.down)):
        # Addresses may differ, because a table has them. Strides are arguments of the launch.
        if len({place[1:] for place in _wanted(places.places(True))}) > 1:
            return (
                f"the experts' {name}-projection gradients have different strides, and the Triton "
                "GEMMs take one for all"
            )
    return None


def _wanted(found: list[MatrixPlace]) -> list[MatrixPlace]:
    # Frozen experts have address 0, and no say in this.
    return [place for place in found if place.address]


def _output(places: GradientPlaces, parts: int, adds: bool) -> Any:
    # Triton is loaded: `calls` is of this module.
    from ..kernels.triton import launches

    tensor = places.first
    if tensor is None:
        return None
    every = places.places(parts == 2)
    one = _wanted(every)[0]
    pitch, step_m = (one.stride_m, 0) if one.stride_n == 1 else (one.stride_n, one.stride_m)
    part = one.stride_part if parts == 2 else one.stride_m
    strides = (part, pitch, step_m, int(tensor.element_size()))
    if places.is_stacked:
        return launches.GradientOutput(tensor, int(tensor.stride()[-3]), *strides, adds=adds)
    # Launches fill the table: a copy from pageable memory would wait for the device.
    addresses = torch.empty((len(every),), dtype=torch.int64, device=device_of(tensor))
    for call in launches.addresses_calls(addresses, [place.address for place in every]):
        call.launch()
    return launches.GradientOutput(tensor, 0, *strides, addresses=addresses, adds=adds)
