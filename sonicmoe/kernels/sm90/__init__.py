"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in
the `.cu` files.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

from ...enums import ACTIVATIONS, ActivationParameters, ActivationType, ZCode
from ...jit.cuda_source import CudaSource
from .. import cuda_sources
from ..cuda_quantize import quantize_source
from ..cuda_wgrad import wgrad_operands_source
from ..host import passes_source

_HERE = Path(__file__).parent
# Of a build of all activations, which tests use: every parameter is on, so no code is left out, and
# z of unit scale reaches every bound.
PARAMETERS_OF_ALL: dict[ActivationType, ActivationParameters] = {
    ActivationType.SWIGLU_CLAMP: (("limit", 1.5),),
    ActivationType.SITU_GLU: (("beta", 2.0), ("linear_beta", 2.5)),
}


def fp8_grouped_gemm_source(
    arch: str,
    activation: ActivationType | None = None,
    parameters: ActivationParameters = (),
    z: ZCode = ZCode.INT8,
    steady: bool = False,
) -> CudaSource:
    """Exports `activation_names`, `grouped_gemm` and `gather_gated_gemm`. One artefact serves every
    model of an activation, its parameters (None: of any, as a test has it) and a form of z, because
    sizes are launch arguments.
    """
    return _gated_source("fp8_grouped_gemm", arch, activation, parameters, z, steady)


def fp8_dgated_source(
    arch: str,
    activation: ActivationType | None = None,
    parameters: ActivationParameters = (),
    z: ZCode = ZCode.INT8,
    steady: bool = False,
) -> CudaSource:
    """Exports `activation_names` and `gather_dgated_gemm`. One artefact serves every model of an
    activation and its parameters (None: of any, as a test has it).
    """
    return _gated_source("fp8_dgated", arch, activation, parameters, z, steady)


def fp8_wgrad_source(arch: str) -> CudaSource:
    """Exports `grouped_wgrad`. One artefact serves every model."""
    return CudaSource.make("fp8_wgrad", _HERE / "fp8_wgrad.cu", arch=arch)


def gathers_first(inner: int) -> bool:
    """Whether tokens are gathered into rows before the GEMMs `up` and `dgated` of a layer with this I,
    and not by them.

    A tile of 256 columns gathers its rows for itself, which makes these GEMMs 14 % slower than on
    rows that lie in order. With I = 8192 a row is gathered 32 or 64 times. Gathering it once costs
    a third of what that saves; at I = 1408 it costs more.
    """
    return inner >= 8192


def bf16_sources(
    arch: str,
    activation: ActivationType,
    parameters: ActivationParameters = (),
    dtype: str = "bfloat16",
    rows_first: bool = False,
    separate: bool = False,
) -> dict[str, CudaSource]:
    """The GEMMs in the dtype of the tokens, "bfloat16" or "float16", by name: "bf16_gemm" exports
    `up` and `grouped_gemm`, "bf16_dgated" `dgated`, "bf16_wgrad" `wgrad` and `wgrad_destination`.
    Sizes, layouts and the order of gate and up are launch arguments. rows_first:
    `gathers_first` of the layer. separate: weights are a matrix of each expert, of which "bf16_gemm"
    exports `expert_matrices`, in the place of one tensor.
    """
    half: dict[str, int | str] = {"FP16": 1} if dtype == "float16" else {}
    gate: dict[str, int | str] = {
        "ACTIVATION": activation.value,
        **_macros(activation, parameters),
    }
    if rows_first:
        gate["ROWS_FIRST"] = 1
    if separate:
        gate["SEPARATE_WEIGHTS"] = 1
    # A weight gradient knows no activation, so all models share its artefact.
    own = {"bf16_gemm": {**gate, **half}, "bf16_dgated": {**gate, **half}, "bf16_wgrad": half}
    return {
        name: CudaSource.make(
            name, _HERE / f"{name}.cu", defines=defines, arch=arch, effort_s=10.0, split=True
        )
        for name, defines in own.items()
    }


def gemm_sources(
    arch: str,
    activation: ActivationType | None = None,
    parameters: ActivationParameters = (),
    z: ZCode = ZCode.INT8,
    steady: bool = False,
) -> tuple[CudaSource, ...]:
    """Every GEMM source; for all activations, as the spill check wants them, or for one and the
    parameters that its layers set.
    """
    makers = fp8_grouped_gemm_source, fp8_dgated_source
    gated = (make(arch, activation, parameters, z, steady) for make in makers)
    return *gated, fp8_wgrad_source(arch)


def engine_sources(
    arch: str,
    activation: ActivationType,
    parameters: ActivationParameters = (),
    z: ZCode = ZCode.INT8,
    steady: bool = False,
) -> tuple[CudaSource, ...]:
    """Everything that the passes launch, and they themselves: what a run of engine `hopper` with
    this activation, these parameters and this form of z loads whatever its other settings.
    """
    others = (*cuda_sources(arch), quantize_source(arch), wgrad_operands_source(arch))
    gemms = gemm_sources(arch, activation, parameters, z, steady)
    return *gemms, *others, passes_source(arch)


def _gated_source(
    name: str,
    arch: str,
    activation: ActivationType | None,
    parameters: ActivationParameters,
    z: ZCode,
    steady: bool,
) -> CudaSource:
    # A model needs one activation, and compiling all of them takes three times as long.
    if activation is not None:
        defines: dict[str, int | str] = {
            "ACTIVATION": activation.value,
            **_macros(activation, parameters),
        }
    else:
        every = (_macros(kind, own) for kind, own in PARAMETERS_OF_ALL.items())
        defines = dict(pair for macros in every for pair in macros.items())
    if z is ZCode.BF16:
        defines["Z_BF16"] = 1
    if steady:
        defines["STEADY_SCALES"] = 1
    return CudaSource.make(
        name, _HERE / f"{name}.cu", defines=defines, arch=arch, effort_s=16.0, split=True
    )


def _macros(activation: ActivationType, parameters: ActivationParameters) -> dict[str, str]:
    """The parameters of an activation as `activations.cuh` reads them; one that is off has no
    macro.
    """
    values = ACTIVATIONS[activation].values(parameters)
    on = {name: value for name, value in values.items() if value != inf}
    return {f"{activation.value}_{name}".upper(): f"{on[name]!r}f" for name in on}
