"""GEMM kernels for Hopper (`sm_90a`), CUDA C++: what they compute is said at their entry points in
the `.cu` files.
"""

from __future__ import annotations

from pathlib import Path

from ...config import ResolvedConfig
from ...enums import EngineName
from ...jit.cache import default_cache
from ...jit.cuda_source import CudaSource
from ...jit.key import package_versions
from ...jit.plan import ModelSpec, provides
from ...jit.toolchain import find_toolkit
from .. import cuda_sources
from ..cuda_quantize import quantize_source
from ..cuda_wgrad import wgrad_operands_source

_HERE = Path(__file__).parent


def fp8_grouped_gemm_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `grouped_gemm` and `gather_gated_gemm`. One artefact serves every model: sizes are
    launch arguments.
    """
    return CudaSource.make("fp8_grouped_gemm", _HERE / "fp8_grouped_gemm.cu", arch=arch)


def fp8_dgated_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `gather_dgated_gemm`. One artefact serves every model."""
    return CudaSource.make("fp8_dgated", _HERE / "fp8_dgated.cu", arch=arch)


def fp8_wgrad_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `grouped_wgrad`. One artefact serves every model."""
    return CudaSource.make("fp8_wgrad", _HERE / "fp8_wgrad.cu", arch=arch)


def passes_source(arch: str = "sm_90a") -> CudaSource:
    """Exports the passes, which launch the kernels of the other sources, and holds no kernel. One
    artefact serves every model.
    """
    return CudaSource.make("passes", _HERE / "passes.cu", arch=arch)


def gemm_sources(arch: str = "sm_90a") -> tuple[CudaSource, ...]:
    """Every GEMM source, for the spill check."""
    return fp8_grouped_gemm_source(arch), fp8_dgated_source(arch), fp8_wgrad_source(arch)


def engine_sources(arch: str = "sm_90a") -> tuple[CudaSource, ...]:
    """Everything that the passes launch, and they themselves: what a run of engine `hopper` loads
    whatever its settings.
    """
    others = (*cuda_sources(arch), quantize_source(arch), wgrad_operands_source(arch))
    return *gemm_sources(arch), *others, passes_source(arch)


def missing_tool(arch: str = "sm_90a") -> str | None:
    """Why this machine can neither compile nor load the engine's kernels, or None: what the cache
    holds needs no compiler.
    """
    if dict(package_versions("apache-tvm-ffi"))["apache-tvm-ffi"] == "absent":
        return "apache-tvm-ffi, which loads and launches its kernels, is not installed"
    cache = default_cache()
    if find_toolkit() is None and any(
        cache.try_load(source.key()) is None for source in engine_sources(arch)
    ):
        return "there is no nvcc to compile its kernels, and the compile cache does not hold them"
    return None


@provides("hopper")
def hopper_jobs(spec: ModelSpec, config: ResolvedConfig) -> tuple[CudaSource, ...]:
    """The kernels of an FP8 run, whatever the dtype of its parameters; none where another engine
    was asked for.
    """
    wanted = config.fp8 and config.engine in (EngineName.AUTO, EngineName.HOPPER)
    return engine_sources(spec.arch) if wanted else ()
