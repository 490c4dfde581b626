"""Constants of a graph, made once when it is compiled. Importing this module loads the compiler."""

from __future__ import annotations

import torch

from ..enums import ActivationParameters, ActivationType
from ..layouts import WeightLayout
from .plan import make_plan, number_of


@torch.compiler.assume_constant_result
def plan_number(
    activation: str,
    parameters: ActivationParameters,
    transposed: bool,
    split_half: bool,
    apart: bool,
    use_fp8: bool | None,
    face: str,
) -> int:
    """The number of the plan in force now."""
    # `assume_constant_result` takes constants, so the members of enums and layouts travel as plain
    # values.
    layout = WeightLayout(transposed, split_half, apart)
    asked = ActivationType(activation), layout, use_fp8, parameters, face
    return number_of(make_plan(*asked))
