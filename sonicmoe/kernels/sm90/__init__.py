"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in the `.cu` files."""

from __future__ import annotations

from pathlib import Path

from ...config import ResolvedConfig
from ...enums import EngineName
from ...jit.cache import default_cache
from ...jit.cuda_source import CudaSource
from ...jit.key import package_versions
from ...jit.plan import ModelSpec, provides
from ...jit.toolchain import find_toolkit

_HERE = Path(__file__).parent


def fp8_grouped_gemm_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `grouped_gemm` and `gather_gated_gemm`. One artefact serves every model: sizes are launch arguments."""
    return CudaSource.make("fp8_grouped_gemm", _HERE / "fp8_grouped_gemm.cu", arch=arch)


def fp8_dgated_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `gather_dgated_gemm`. One artefact serves every model."""
    return CudaSource.make("fp8_dgated", _HERE / "fp8_dgated.cu", arch=arch)


def fp8_wgrad_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `grouped_wgrad`. One artefact serves every model."""
    return CudaSource.make("fp8_wgrad", _HERE / "fp8_wgrad.cu", arch=arch)


def gemm_sources(arch: str = "sm_90a") -> tuple[CudaSource, ...]:
    """Every GEMM source, for warm-up and for the spill check."""
    return fp8_grouped_gemm_source(arch), fp8_dgated_source(arch), fp8_wgrad_source(arch)


def missing_tool(arch: str = "sm_90a") -> str | None:
    """Why this machine can neither compile nor load the GEMMs, or None: what the cache holds needs no compiler."""
    if dict(package_versions("apache-tvm-ffi"))["apache-tvm-ffi"] == "absent":
        return "apache-tvm-ffi, which loads and launches its GEMMs, is not installed"
    cache = default_cache()
    if find_toolkit() is None and any(cache.try_load(source.key()) is None for source in gemm_sources(arch)):
        return "there is no nvcc to compile its GEMMs, and the compile cache does not hold them"
    return None


@provides("hopper")
def hopper_jobs(spec: ModelSpec, config: ResolvedConfig) -> tuple[CudaSource, ...]:
    """The GEMMs of an FP8 run, whatever the dtype of its parameters; none where another engine was asked for."""
    wanted = config.fp8 and config.engine in (EngineName.AUTO, EngineName.HOPPER)
    return gemm_sources(spec.arch) if wanted else ()
