"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in
the `.cu` files.
"""

from __future__ import annotations

from pathlib import Path

from ...enums import ActivationType
from ...jit.cuda_source import CudaSource
from .. import cuda_sources
from ..cuda_quantize import quantize_source
from ..cuda_wgrad import wgrad_operands_source
from ..host import passes_source

_HERE = Path(__file__).parent


def fp8_grouped_gemm_source(arch: str, activation: ActivationType | None = None) -> CudaSource:
    """Exports `activation_names`, `grouped_gemm` and `gather_gated_gemm`. One artefact serves every
    model of an activation (None: of any), because sizes are launch arguments.
    """
    return _gated_source("fp8_grouped_gemm", arch, activation)


def fp8_dgated_source(arch: str, activation: ActivationType | None = None) -> CudaSource:
    """Exports `activation_names` and `gather_dgated_gemm`. One artefact serves every model of an
    activation (None: of any).
    """
    return _gated_source("fp8_dgated", arch, activation)


def fp8_wgrad_source(arch: str) -> CudaSource:
    """Exports `grouped_wgrad`. One artefact serves every model."""
    return CudaSource.make("fp8_wgrad", _HERE / "fp8_wgrad.cu", arch=arch)


def gemm_sources(arch: str, activation: ActivationType | None = None) -> tuple[CudaSource, ...]:
    """Every GEMM source; for all activations, as the spill check wants them, or for one."""
    gated = fp8_grouped_gemm_source(arch, activation), fp8_dgated_source(arch, activation)
    return *gated, fp8_wgrad_source(arch)


def engine_sources(arch: str, activation: ActivationType) -> tuple[CudaSource, ...]:
    """Everything that the passes launch, and they themselves: what a run of engine `hopper` with
    this activation loads whatever its other settings.
    """
    others = (*cuda_sources(arch), quantize_source(arch), wgrad_operands_source(arch))
    return *gemm_sources(arch, activation), *others, passes_source(arch)


def _gated_source(name: str, arch: str, activation: ActivationType | None) -> CudaSource:
    # A model needs one activation, and compiling all of them takes twice as long.
    defines = {} if activation is None else {"ACTIVATION": activation.value}
    return CudaSource.make(
        name, _HERE / f"{name}.cu", defines=defines, arch=arch, effort_s=16.0, split=True
    )
