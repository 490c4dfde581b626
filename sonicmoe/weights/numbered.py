"""The parameters of Megatron-Core's grouped experts: two modules, of the up- and of the
down-projections, each with a parameter `weight{i}` of every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..enums import ActivationType, is_glu
from ..layouts import WeightLayout
from ..weight_source import WeightSource
from .parameters import SeparateParameters, check_parameter

Tensor = torch.Tensor


class NumberedParameters(SeparateParameters):
    """`up.weight{i} [2I, H]`, gate rows first, and `down.weight{i} [H, I]`; `[I, H]` without a gate.

    Args:
        up, down: the modules.
        names: what the caller calls them, for messages.
        through_autograd: autograd gets every gradient, also where a parameter has `main_grad`.
    """

    def __init__(
        self,
        up: Any,
        down: Any,
        sizes: Sequence[int],
        activation: ActivationType,
        *,
        names: tuple[str, str] = ("up", "down"),
        through_autograd: bool = False,
    ) -> None:
        """`sizes`: E, H, I, which the weights must match."""
        super().__init__(activation, *sizes)
        self.layout = WeightLayout(split_half=is_glu(activation))
        self._modules, self._names = (up, down), names
        self._through_autograd = through_autograd
        self._seen: Sequence[Tensor] = ()
        self.parameters()

    def parameters(self) -> list[Tensor]:
        """What the modules hold now: Megatron-FSDP puts other tensors there. Each is checked when it is
        seen for the first time.
        """
        held = [
            module._parameters[f"weight{expert}"]
            for module in self._modules
            for expert in range(self._count)
        ]
        if len(held) != len(self._seen) or not all(map(is_, held, self._seen)):
            self._check(held)
            self._seen = held
        # A view has no `main_grad`, and passes its gradient on.
        return [weight.view_as(weight) for weight in held] if self._through_autograd else held

    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        """The parameters themselves: FSDP may give one other memory between a forward and its backward,
        and a view of it stays where it was.
        """
        return super().source(self._seen)

    def _check(self, weights: Sequence[Tensor]) -> None:
        (_, *up), (_, *down) = self._native_shapes
        first = "[2I, H]" if is_glu(self.activation) else "[I, H]"
        for index, weight in enumerate(weights):
            shape, legend = (up, first) if index < self._count else (down, "[H, I]")
            check_parameter(weight, self.name_of(index), tuple(shape), legend)

    def name_of(self, index: int) -> str:
        return f"{self._names[index >= self._count]}.weight{index % self._count}"
