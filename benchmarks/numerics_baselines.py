"""Yardsticks of `numerics_report.py`: recipes, and forms of dispatch. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sonicmoe.enums import ZCode
from sonicmoe.quant.recipes import DEEPSEEK_V3, MXFP8, RECIPES, Fp8Recipe


class Dispatch(Enum):
    """How rows reach the experts' rank: in bf16, or quantised by their sender with one scale per
    row and 128 columns; tokens alone, or gradients of the output too (`BOTH`).
    """

    BF16 = "bf16"
    FP8 = "fp8"
    FP8_BOTH = "fp8-both"

    @property
    def quantised(self) -> tuple[str, ...]:
        """The operands that senders quantise."""
        return {Dispatch.BF16: (), Dispatch.FP8: ("x",)}.get(self, ("x", "dout"))


@dataclass(frozen=True)
class Baseline:
    """A recipe and saved-z code that others are measured against.

    absolute: whether the bars on Gaussian data hold beside it.
    slack: a tensor misses this bar from this multiple of the baseline's error on.
    """

    recipe: Fp8Recipe
    z: ZCode
    absolute: bool
    slack: float = 1.03


BASELINES = {
    "deepseek-v3": Baseline(DEEPSEEK_V3, ZCode.E4M3, absolute=True),
    # The bar of recipes that are chosen by name for their speed: not worse, without slack.
    "deepseek-v3.1": Baseline(RECIPES["deepseek-v3-pow2"], ZCode.E4M3, absolute=True, slack=1.0),
    # Power-of-two scales cost more than the absolute bars leave. z is bf16, as engine `mxfp8` has
    # it: a baseline with a coarser z would be easier to meet.
    "mxfp8": Baseline(MXFP8, ZCode.BF16, absolute=False),
}
