"""Where the weight-gradient GEMMs for Hopper leave their sums: matrices of the parameters' own
gradients, wherever these lie, in the form of the copy engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch

from .gradient_memory import Place, WeightTarget

MAX_DESTINATIONS = 1024  # kept for one device: those of 512 layers whose gradients stay in place


class WgradOutput(IntEnum):
    """What becomes of the sums of wgrad; the numbers of `wgrad_places.cuh`."""

    ADD_F32 = 0
    WRITE_F32 = 1
    WRITE_BF16 = 2


# By the dtype of the memory.
WRITTEN = {torch.float32: WgradOutput.WRITE_F32, torch.bfloat16: WgradOutput.WRITE_BF16}
ADDED = {torch.float32: WgradOutput.ADD_F32}


class Destinations:
    """Those of one device. A destination is addresses, shapes and strides, and holds no memory. So
    equal ones are made once, and anew only where one of these numbers changed.
    """

    def __init__(self, make: Callable[..., Any] | None) -> None:
        """`make`: `wgrad_destination` of a module of the GEMMs."""
        self._make = make
        self._made: dict[tuple[Any, ...], Any] = {}

    def of(
        self, weight: WeightTarget, split: bool, outputs: Mapping[torch.dtype, WgradOutput]
    ) -> Any:
        """That of one projection; `split`: its gate and up rows are two parts."""
        # Also fresh memory is known again: the allocator hands out the addresses of the step before.
        first = weight.first
        output = outputs[torch.float32 if first is None else first.dtype]
        key = output, weight.layout.transposed, split, weight.num_experts, weight.fingerprint
        return self.once(key, weight, lambda: weight.places(split), split, output)

    def once(
        self,
        key: tuple[Any, ...],
        weight: WeightTarget,
        places: Callable[[], Sequence[Place]],
        split: bool,
        output: WgradOutput,
    ) -> Any:
        """The destination under `key`, of the matrices of `weight` at these places."""
        made = self._made.get(key)
        if made is None:
            assert self._make is not None
            numbers = [number for place in places() for number in place]
            made = self._make(*weight.native_size, split, numbers, output)
            if len(self._made) >= MAX_DESTINATIONS:
                self._made.clear()
            self._made[key] = made
        return made
