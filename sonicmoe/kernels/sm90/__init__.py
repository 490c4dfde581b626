"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in
the `.cu` files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...enums import ACTIVATIONS, ActivationParameters, ActivationType, ZCode
from ...errors import ConfigError
from ...jit.cuda_source import CudaSource
from .. import cuda_sources
from ..cuda_quantize import quantize_source
from ..cuda_wgrad import bias_gradients_source, low_rank_source, wgrad_operands_source
from ..host import program_source

_HERE = Path(__file__).parent


def fp8_grouped_gemm_source(
    arch: str,
    activation: ActivationType | None = None,
    z: ZCode = ZCode.ADAPTIVE,
    bias: bool = False,
    low_rank: bool = False,
) -> CudaSource:
    """Exports `activation_names`, `grouped_gemm` and `gather_gated_gemm`. One artefact serves every
    model of an activation (None: of any, as a test has it), a form of z, with or without biases,
    and with or without low-rank adapters, because sizes, ranks and the activation's parameters are
    launch arguments.
    """
    return _gated_source("fp8_grouped_gemm", arch, activation, z, bias, low_rank)


def fp8_dgated_source(
    arch: str,
    activation: ActivationType | None = None,
    z: ZCode = ZCode.ADAPTIVE,
    low_rank: bool = False,
) -> CudaSource:
    """Exports `activation_names` and `gather_dgated_gemm`. One artefact serves every model of an
    activation (None: of any, as a test has it), a form of z, and with or without low-rank adapters.
    """
    # The reader of the adaptive code reads INT8 too, so one artefact serves both.
    kept = ZCode.ADAPTIVE if z is ZCode.INT8 else z
    return _gated_source("fp8_dgated", arch, activation, kept, low_rank=low_rank)


def fp8_wgrad_source(arch: str) -> CudaSource:
    """Exports `grouped_wgrad`. One artefact serves every model."""
    return CudaSource.make("fp8_wgrad", _HERE / "fp8_wgrad.cu", arch=arch)


def launch_parameters(
    exported: Iterable[object], activation: ActivationType, own: ActivationParameters = ()
) -> tuple[int, float, float]:
    """The arguments `activation`, `first` and `second` of a launch.

    Args:
        exported: what the module's `activation_names` returns.
        activation: one of those it has.
        own: the parameters that a layer sets; the others are at their defaults.
    """
    values = ACTIVATIONS[activation].values(own)
    for number, (name, *parameters) in enumerate(str(line).split() for line in exported):
        if name == activation.value:
            first, second = [*(values[parameter] for parameter in parameters), 0.0, 0.0][:2]
            return number, first, second
    raise ConfigError(f"the module was not compiled for activation {activation.value!r}")


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
    dtype: str = "bfloat16",
    rows_first: bool = False,
    separate: bool = False,
    low_rank: bool = False,
) -> dict[str, CudaSource]:
    """The GEMMs in the dtype of the tokens, "bfloat16" or "float16", by name: "bf16_gemm" exports
    `up` and `grouped_gemm`, "bf16_dgated" `dgated`, "bf16_wgrad" `wgrad` and `wgrad_destination`.
    Sizes, layouts, the order of gate and up, and the activation's parameters are launch arguments.
    "bf16_gemm" and "bf16_dgated" export `activation_names` too. rows_first:
    `gathers_first` of the layer. separate: weights are a matrix of each expert, of which "bf16_gemm"
    exports `expert_matrices`, in the place of one tensor. low_rank: adapters may come beside them.
    """
    half: dict[str, int | str] = {"FP16": 1} if dtype == "float16" else {}
    gate: dict[str, int | str] = {"ACTIVATION": activation.value}
    if rows_first:
        gate["ROWS_FIRST"] = 1
    if separate:
        gate["SEPARATE_WEIGHTS"] = 1
    if low_rank:
        gate["LOW_RANK"] = 1
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
    z: ZCode = ZCode.ADAPTIVE,
    bias: bool = False,
    low_rank: bool = False,
) -> tuple[CudaSource, ...]:
    """Every GEMM source; for all activations, as the spill check wants them, or for one."""
    return (
        fp8_grouped_gemm_source(arch, activation, z, bias, low_rank),
        fp8_dgated_source(arch, activation, z, low_rank),
        fp8_wgrad_source(arch),
    )


def engine_sources(
    arch: str,
    activation: ActivationType,
    z: ZCode = ZCode.ADAPTIVE,
    bias: bool = False,
    low_rank: bool = False,
) -> tuple[CudaSource, ...]:
    """Everything that the programs launch, and what replays them: what a run of engine `hopper` with
    this activation, this form of z, and with or without biases and adapters loads whatever its
    other settings.
    """
    others = (*cuda_sources(arch), quantize_source(arch), wgrad_operands_source(arch))
    beside = [bias_gradients_source(arch)] * bias + [low_rank_source(arch)] * low_rank
    gemms = gemm_sources(arch, activation, z, bias, low_rank)
    return *gemms, *others, *beside, program_source(arch)


def _gated_source(
    name: str,
    arch: str,
    activation: ActivationType | None,
    z: ZCode,
    bias: bool = False,
    low_rank: bool = False,
) -> CudaSource:
    on = {"BIAS": bias, "LOW_RANK": low_rank}
    defines: dict[str, int | str] = {macro: 1 for macro, is_on in on.items() if is_on}
    if z is not ZCode.ADAPTIVE:
        defines[f"Z_{z.name}"] = 1
    # A model needs one activation, and compiling all of them takes three times as long.
    if activation is not None:
        defines["ACTIVATION"] = activation.value
    return CudaSource.make(
        name, _HERE / f"{name}.cu", defines=defines, arch=arch, effort_s=16.0, split=True
    )
