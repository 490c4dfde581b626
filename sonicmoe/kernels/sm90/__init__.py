"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in
the `.cu` files.
"""

from __future__ import annotations

from pathlib import Path

from ...jit.cuda_source import CudaSource
from .. import cuda_sources
from ..cuda_quantize import quantize_source
from ..cuda_wgrad import wgrad_operands_source
from ..host import passes_source

_HERE = Path(__file__).parent


def fp8_grouped_gemm_source(arch: str) -> CudaSource:
    """Exports `activation_names`, `grouped_gemm` and `gather_gated_gemm`. One artefact serves every model: sizes are
    launch arguments.
    """
    return CudaSource.make("fp8_grouped_gemm", _HERE / "fp8_grouped_gemm.cu", arch=arch)


def fp8_dgated_source(arch: str) -> CudaSource:
    """Exports `activation_names` and `gather_dgated_gemm`. One artefact serves every model."""
    return CudaSource.make("fp8_dgated", _HERE / "fp8_dgated.cu", arch=arch)


def fp8_wgrad_source(arch: str) -> CudaSource:
    """Exports `grouped_wgrad`. One artefact serves every model."""
    return CudaSource.make("fp8_wgrad", _HERE / "fp8_wgrad.cu", arch=arch)


def gemm_sources(arch: str) -> tuple[CudaSource, ...]:
    """Every GEMM source, for the spill check."""
    return fp8_grouped_gemm_source(arch), fp8_dgated_source(arch), fp8_wgrad_source(arch)


def engine_sources(arch: str) -> tuple[CudaSource, ...]:
    """Everything that the passes launch, and they themselves: what a run of engine `hopper` loads
    whatever its settings.
    """
    others = (*cuda_sources(arch), quantize_source(arch), wgrad_operands_source(arch))
    return *gemm_sources(arch), *others, passes_source(arch)
