"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in `fp8_grouped_gemm.cu`."""

from __future__ import annotations

from pathlib import Path

from ...jit.cuda_source import CudaSource

_HERE = Path(__file__).parent


def fp8_grouped_gemm_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `grouped_gemm` and `gather_gated_gemm`. One artefact serves every model: sizes are launch arguments."""
    return CudaSource.make("fp8_grouped_gemm", _HERE / "fp8_grouped_gemm.cu", arch=arch)
