"""What a call computes, as plain data. Imports no framework, so that `capabilities` can judge it
without a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from enum import Enum

from ..config import ResolvedConfig
from ..enums import ActivationParameters, ActivationType, ZCode, layer_parameters
from ..errors import ConfigError
from ..quant.recipes import RECIPES, Fp8Recipe


@dataclass(frozen=True)
class EngineSettings:
    """What a call computes; static over a training run.

    `recipe` is None for unquantised operands in the dtype of the tokens. `activation_parameters`
    holds those that differ from the activation's defaults (`enums.layer_parameters`). Every other
    setting has the name that it has in the configuration.
    """

    activation: ActivationType = ActivationType.SWIGLU
    recipe: Fp8Recipe | None = None
    fp8_wgrad: bool = True
    save_z: ZCode = ZCode.ADAPTIVE
    recompute_z: bool = False
    frees_stagewise: bool = False
    iso_weight: bool = False
    gemm_num_sms: int = 0
    activation_parameters: ActivationParameters = ()

    def __post_init__(self) -> None:
        """Check the parameters, and drop those at their defaults: equal layers, equal settings."""
        if self.activation_parameters:
            kept = layer_parameters(self.activation, self.activation_parameters)
            object.__setattr__(self, "activation_parameters", kept)

    @classmethod
    def from_config(
        cls,
        config: ResolvedConfig,
        activation: ActivationType,
        parameters: ActivationParameters = (),
    ) -> EngineSettings:
        """Settings of a resolved configuration, for one layer's activation and its parameters.
        ConfigError for `iso_weight` with a recipe that reads a weight in other blocks in dgrad than
        in forward.
        """
        # One switch for FP8: a recipe without `fp8_mode` is a name that nobody asked for.
        recipe = RECIPES[config.recipe] if config.fp8 else None
        if config.iso_weight and recipe is not None and not recipe.shares_weight_buffers:
            raise ConfigError(
                f"iso_weight needs a recipe with the same weight blocks in forward and dgrad, as isotropic ones are; {recipe.name!r} "
                f"has w1 in {recipe.w1} and {recipe.w1_dgrad}, w2 in {recipe.w2} and {recipe.w2_dgrad}"
            )
        # Every other field is a flag of the same name.
        of_layer = {"activation", "activation_parameters", "recipe"}
        flags = {
            field.name: getattr(config, field.name)
            for field in fields(cls)
            if field.name not in of_layer
        }
        return cls(activation, recipe, **flags, activation_parameters=parameters)

    @functools.cached_property
    def of_weights(self) -> EngineSettings:
        """These settings as far as engine weights depend on them: equal for two calls that can read
        the same ones, whatever each of them saves or recomputes.
        """
        # Everything that is left out changes what a call saves, and no weight.
        return EngineSettings(self.activation, self.recipe, iso_weight=self.iso_weight)

    @functools.cached_property
    def in_one_order(self) -> EngineSettings:
        """With `iso_weight`, where the recipe has the same codes in both orders of a weight."""
        shares = self.recipe is not None and self.recipe.shares_weight_buffers
        return replace(self, iso_weight=True) if shares and not self.iso_weight else self

    @functools.cached_property
    def row_alignment(self) -> int:
        """Rows the routing metadata must pad every expert to."""
        return 128 if self.recipe is None else self.recipe.row_alignment


class TokenFormat(Enum):
    """How tokens reach an engine: plain in their dtype, or quantised by their sender as e4m3 codes
    with one scale per row and 128 columns.
    """

    PLAIN = "plain"
    E4M3_1X128 = "e4m3_1x128"


class GradientMode(Enum):
    """Where an engine leaves weight gradients: added to fp32 accumulators in the native layout, or
    to the parameter's own `main_grad`; or written over whatever was there, into fresh memory in the
    parameter's dtype or into `main_grad`.
    """

    NATIVE = "native"
    MAIN_GRAD = "main_grad"
    FRESH = "fresh"


@dataclass(frozen=True)
class Workload:
    """What is to be computed, as far as it decides which engine can, and with which kernels. Sizes and
    dtype are those of the experts and their tokens.

    separate: each expert has weights of its own, and not a part of stacked ones.
    low_rank: a projection has a low-rank adapter (`low_rank.py`).
    """

    settings: EngineSettings
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"
    bias: bool = False
    separate: bool = False
    tokens: TokenFormat = TokenFormat.PLAIN
    low_rank: bool = False
