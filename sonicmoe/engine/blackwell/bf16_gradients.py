"""Where the GEMMs of quack-kernels add weight gradients: to which tensor of each projection, by which
variant.

The GEMM of a projection knows one address, one stride from expert to expert and one from row to
row. So it adds to stacked tensors only, which are accumulators or the parameters' own memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import ConfigError
from ...kernels.blackwell.quack_gemm import Stored
from ..gradient_places import GradientPlaces
from ..targets import GradientTargets

Tensor = torch.Tensor
_STEP = 4  # values: strides of fp32 are multiples of 16 bytes


class StackedOutput(NamedTuple):
    """A stacked tensor whose last axis is contiguous, and how gradients lie in it."""

    tensor: Tensor
    stored: Stored


def outputs_of(
    targets: GradientTargets, gemms: str = "BF16"
) -> tuple[StackedOutput | None, StackedOutput | None]:
    """The memory that the GEMMs of dw1 and dw2 add to, None where nobody wants that gradient;
    ConfigError names the reason for which they cannot add there. gemms: which ones, in messages.
    """
    # Here and not at the launches: when the second one is refused, the first has added already.
    problem = problem_of(targets, gemms)
    if problem is not None:
        raise ConfigError(f"the {gemms} GEMMs cannot add to these parameters: {problem}")
    return _output(targets.up, True), _output(targets.down, False)


def problem_of(targets: GradientTargets, gemms: str = "BF16") -> str | None:
    """Why the GEMMs cannot add to this memory: one sentence, or None."""
    return targets.once(gemms, lambda: _problem_of(targets, gemms))


def _problem_of(targets: GradientTargets, gemms: str) -> str | None:
    both = ("up-projection gradients", targets.up), ("down-projection gradients", targets.down)
    wanted = [(name, places) for name, places in both if places.first is not None]
    # The GEMM takes one address and one stride from expert to expert.
    for name, places in wanted:
        if not places.is_stacked:
            return f"{name} have a tensor for each expert, and the {gemms} GEMMs add to one for all"
    problem = targets.copy_engine_problem()
    if problem is not None:
        return problem
    for name, places in wanted:
        assert places.first is not None
        # The copy engine needs no such stride where there is one expert, but the GEMM is given it.
        stride = int(places.first.stride()[0])
        if stride % _STEP:
            return (
                f"{name} have stride {stride} from expert to expert; needed: a multiple of {_STEP}"
            )
    up = _output(targets.up, True)
    if up is not None and targets.up.layout.split_half and up.stored is Stored.INNER:
        # Neighbours of the product are gate and up. Apart from each other they are single elements,
        # and the copy engine moves 16 bytes at least.
        return (
            "up-projection gradients hold all gate columns before all up columns and are contiguous "
            f"along them, and the {gemms} GEMMs write gate and up columns in turns"
        )
    return None


def _output(places: GradientPlaces, is_up: bool) -> StackedOutput | None:
    stacked, layout = places.first, places.layout
    if stacked is None:
        return None
    ends_contiguous = int(stacked.stride()[2]) == 1
    tensor = stacked if ends_contiguous else stacked.transpose(1, 2)
    # H is the last axis of a native dw1, and not of a native dw2.
    ends_with_hidden = is_up is not layout.transposed
    if ends_contiguous is not ends_with_hidden:
        return StackedOutput(tensor, Stored.INNER)
    return StackedOutput(tensor, Stored.HALVES if is_up and layout.split_half else Stored.HIDDEN)
