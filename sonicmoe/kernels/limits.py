"""For which models each precision has kernels, said without a framework: warm-up leaves out the
rest and says why.
"""

from __future__ import annotations

from ..config import ResolvedConfig
from ..enums import ActivationType, EngineName, ZCode
from ..jit.plan import BF16, FP8, FP8_PLAIN_WGRAD, ModelSpec, limits
from .quack_gemm import ARCH, MlpShape, missing_package

FP8_RECIPE = "iso128"
FP8_ACTIVATIONS = (ActivationType.SWIGLU, ActivationType.GEGLU, ActivationType.REGLU)
FP8_Z = ZCode.INT8
HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE = 16, 64
DPROB_COLUMNS = 256  # of dy1 in one of dgated's partial sums: a tile's


def fp8_settings_problem(recipe: str, activation: ActivationType, save_z: ZCode) -> str | None:
    """What of these settings engine `hopper` has no kernels for, or None."""
    if recipe != FP8_RECIPE:
        return f"the recipe is {recipe!r}, and its kernels are made for {FP8_RECIPE!r}"
    if activation not in FP8_ACTIVATIONS:
        return f"the activation is {activation.value!r}, and it has {[member.value for member in FP8_ACTIVATIONS]}"
    if save_z is not FP8_Z:
        return f"z is saved as {save_z.value!r}, and it stores {FP8_Z.value!r}"
    return None


def fp8_sizes_problem(hidden: int, intermediate: int) -> str | None:
    """Why engine `hopper` has no kernels for these sizes, or None."""
    if hidden % HIDDEN_MULTIPLE == 0 and intermediate % INTERMEDIATE_MULTIPLE == 0:
        return None
    needed = f"multiples of {HIDDEN_MULTIPLE} and {INTERMEDIATE_MULTIPLE}"
    return f"H is {hidden} and I is {intermediate}, and it needs {needed}"


@limits(FP8)
def fp8_problem(spec: ModelSpec, config: ResolvedConfig) -> str | None:
    """Why engine `hopper` has no kernels for `spec`, or None."""
    if config.engine not in (EngineName.AUTO, EngineName.HOPPER):
        return _asked_for(config)
    if spec.arch != ARCH:
        return _other_arch(spec)
    if spec.dtype == "float16":  # fp32 master weights go with bfloat16 tokens
        return "tokens are float16, and it takes bfloat16"
    sizes = fp8_sizes_problem(spec.H, spec.I)
    return sizes or fp8_settings_problem(
        config.recipe, ActivationType(spec.activation), config.save_z
    )


@limits(FP8_PLAIN_WGRAD)
def plain_wgrad_problem(spec: ModelSpec, config: ResolvedConfig) -> str | None:
    """Why there are no GEMMs for unquantised weight gradients of an FP8 run of `spec`, or None."""
    return _gemm_problem(spec)


@limits(BF16)
def bf16_problem(spec: ModelSpec, config: ResolvedConfig) -> str | None:
    """Why engine `bf16` has no kernels for `spec`, or None."""
    if config.engine not in (EngineName.AUTO, EngineName.BF16):
        return _asked_for(config)
    return _gemm_problem(spec)


def _gemm_problem(spec: ModelSpec) -> str | None:
    if spec.arch != ARCH:
        return _other_arch(spec)
    # fp32 master weights are rounded to the dtype of the tokens.
    dtype = "bfloat16" if spec.dtype == "float32" else spec.dtype
    return (
        MlpShape(spec.H, spec.I, ActivationType(spec.activation), dtype).problem()
        or missing_package()
    )


def _asked_for(config: ResolvedConfig) -> str:
    return f"the configuration asks for engine {config.engine.value!r}"


def _other_arch(spec: ModelSpec) -> str:
    return f"the architecture is {spec.arch}, and its GEMMs are for {ARCH}"
