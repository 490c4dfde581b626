"""Where the weight-gradient GEMMs for Hopper leave their sums: matrices of the parameters' own
gradients, wherever these lie, in the form of the copy engine.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from .gradient_places import GradientPlaces
from .settings import GradientMode


class WgradOutput(IntEnum):
    """What becomes of the sums of wgrad; the numbers of `wgrad_places.cuh`."""

    ADD_F32 = 0
    WRITE_F32 = 1
    WRITE_BF16 = 2


# By the dtype of the memory.
WRITTEN = {torch.float32: WgradOutput.WRITE_F32, torch.bfloat16: WgradOutput.WRITE_BF16}
ADDED = {torch.float32: WgradOutput.ADD_F32}


def wgrad_destination(
    places: GradientPlaces, make: Callable[..., Any], mode: GradientMode, *, parts: bool
) -> Any:
    """The destination of one projection's gradients: addresses and strides, and no memory. make:
    `wgrad_destination` of a module of the GEMMs. parts: gate and up rows are two parts.
    """
    outputs = WRITTEN if mode is GradientMode.FRESH else ADDED
    output = outputs[torch.float32 if places.first is None else places.first.dtype]
    numbers = [number for place in places.places(parts) for number in place]
    return make(*places.native_size, parts, numbers, output)
