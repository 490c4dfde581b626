"""Where the BF16 GEMMs add weight gradients: to which tensor of each projection, by which variant.

The GEMM of a projection knows one address, one stride from expert to expert and one from row to
row. So it adds to stacked tensors only, which are accumulators or the parameters' own memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ConfigError
from ..kernels.quack_gemm import Stored
from .gradient_memory import WeightTarget
from .targets import GradientTargets, NativeBuffer, ParameterTargets

Tensor = torch.Tensor
_STEP = 4  # values: strides of fp32 are multiples of 16 bytes


class Destination(NamedTuple):
    """A stacked tensor whose last axis is contiguous, and how gradients lie in it."""

    tensor: Tensor
    stored: Stored


class Destinations(NamedTuple):
    """The memory that GEMMs of one backward add to; None: nobody wants that gradient."""

    dw1: Destination | None
    dw2: Destination | None

    @property
    def are_wanted(self) -> bool:
        """Whether anybody wants a gradient."""
        return any(place is not None for place in self)

    @classmethod
    def of(cls, targets: GradientTargets, gemms: str = "BF16") -> Destinations:
        """Those of targets; ConfigError names the reason for which the GEMMs cannot add there.
        gemms: which ones, in messages.
        """
        if isinstance(targets, NativeBuffer):
            dw1, dw2 = targets.dw1, targets.dw2
            return cls(Destination(dw1, Stored.HIDDEN), Destination(dw2, Stored.INNER))
        if not isinstance(targets, ParameterTargets):
            raise ConfigError(f"gradient targets are {type(targets).__name__}")
        # Here and not at the launches: when the second one is refused, the first has added already.
        problem = problem_of(targets, gemms)
        if problem is not None:
            raise ConfigError(f"the {gemms} GEMMs cannot add to these parameters: {problem}")
        up, down = targets.up, targets.down
        return cls(_up(up) if up.is_wanted else None, _down(down) if down.is_wanted else None)


def problem_of(targets: ParameterTargets, gemms: str = "BF16") -> str | None:
    """Why the GEMMs cannot add to these parameters, once `ParameterTargets.problem` has found
    nothing: one sentence, or None.
    """
    return targets.once(gemms, lambda: _problem_of(targets, gemms))


def _problem_of(targets: ParameterTargets, gemms: str) -> str | None:
    both = ("up-projection gradients", targets.up), ("down-projection gradients", targets.down)
    wanted = [(name, weight) for name, weight in both if weight.is_wanted]
    # The GEMM takes one address and one stride from expert to expert.
    for name, weight in wanted:
        if not weight.is_stacked:
            return f"{name} have a tensor for each expert, and the {gemms} GEMMs add to one for all"
    problem = targets.copy_engine_problem()
    if problem is not None:
        return problem
    for name, weight in wanted:
        assert weight.tensors[0] is not None
        # The copy engine needs no such stride where there is one expert, but the GEMM is given it.
        stride = int(weight.tensors[0].stride()[0])
        if stride % _STEP:
            return (
                f"{name} have stride {stride} from expert to expert; needed: a multiple of {_STEP}"
            )
    up = targets.up
    if up.is_wanted and up.layout.split_half and _up(up).stored is Stored.INNER:
        # Neighbours of the product are gate and up. Apart from each other they are single elements,
        # and the copy engine moves 16 bytes at least.
        return (
            "up-projection gradients hold all gate columns before all up columns and are contiguous "
            f"along them, and the {gemms} GEMMs write gate and up columns in turns"
        )
    return None


def _up(weight: WeightTarget) -> Destination:
    # A transposed up-projection is `[E, H, N1]`: H is axis 1.
    stored, tensor = _along(weight, 1 if weight.layout.transposed else 2)
    if stored is Stored.HIDDEN and weight.layout.split_half:
        stored = Stored.HALVES
    return Destination(tensor, stored)


def _down(weight: WeightTarget) -> Destination:
    stored, tensor = _along(weight, 2 if weight.layout.transposed else 1)
    return Destination(tensor, stored)


def _along(weight: WeightTarget, hidden: int) -> tuple[Stored, Tensor]:
    """Whether a stacked tensor is contiguous along the axis `hidden` of its shape, and a view of it
    that is contiguous along its last axis.
    """
    stacked = weight.tensors[0]
    assert stacked is not None
    contiguous = 2 if int(stacked.stride()[2]) == 1 else 1
    stored = Stored.HIDDEN if contiguous == hidden else Stored.INNER
    return stored, stacked if contiguous == 2 else stacked.transpose(1, 2)
