"""For which models each precision has kernels, said without a framework: warm-up leaves out the rest and says why."""

from __future__ import annotations

from ..config import ResolvedConfig
from ..enums import ActivationType, EngineName, ZCode
from ..jit.plan import BF16, FP8, FP8_PLAIN_WGRAD, ModelSpec, limits
from .quack_gemm import ARCH, MlpShape, missing_package

FP8_RECIPE = "iso128"
FP8_ACTIVATIONS = (ActivationType.SWIGLU, ActivationType.GEGLU, ActivationType.REGLU)
FP8_Z = ZCode.INT8
HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE = 16, 64


@limits(FP8)
def fp8_problem(spec: ModelSpec, config: ResolvedConfig) -> str | None:
    """Why engine `hopper` has no kernels for `spec`, or None."""
    activations = [member.value for member in FP8_ACTIVATIONS]
    multiples = f"multiples of {HIDDEN_MULTIPLE} and {INTERMEDIATE_MULTIPLE}"
    checks = (
        (config.engine in (EngineName.AUTO, EngineName.HOPPER), _asked_for(config)),
        (spec.arch == ARCH, _other_arch(spec)),
        (spec.dtype != "float16", "tokens are float16, and its GEMMs take bfloat16"),
        (
            spec.H % HIDDEN_MULTIPLE == 0 and spec.I % INTERMEDIATE_MULTIPLE == 0,
            f"H is {spec.H} and I is {spec.I}, and its GEMMs need {multiples}",
        ),
        (spec.activation in activations, f"the activation is {spec.activation!r}, and it has {activations}"),
        (config.recipe == FP8_RECIPE, f"the recipe is {config.recipe!r}, and its kernels are made for {FP8_RECIPE!r}"),
        (config.save_z is FP8_Z, f"z is saved as {config.save_z.value!r}, and it stores {FP8_Z.value!r}"),
    )
    return next((reason for holds, reason in checks if not holds), None)


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
    return MlpShape(spec.H, spec.I, ActivationType(spec.activation), dtype).problem() or missing_package()


def _asked_for(config: ResolvedConfig) -> str:
    return f"the configuration asks for engine {config.engine.value!r}"


def _other_arch(spec: ModelSpec) -> str:
    return f"the architecture is {spec.arch}, and its GEMMs are for {ARCH}"
