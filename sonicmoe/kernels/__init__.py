"""GPU kernels: CUDA C++ sources (`cuda/`) and their Triton counterparts. No policy, no framework,
no caching.
"""

from __future__ import annotations

from pathlib import Path

from ..config import ResolvedConfig
from ..jit.cuda_source import CudaSource
from ..jit.plan import ModelSpec, provides

_CUDA = Path(__file__).with_name("cuda")
DEFAULT_ARCH = "sm_90a"


def routing_metadata_source(arch: str = DEFAULT_ARCH) -> CudaSource:
    """Exports `build_metadata`, `gather_or_zero`, `sum_or_zero`, `scratch_per_expert`,
    `max_experts`. One artefact serves every model.
    """
    return CudaSource.make("routing_metadata", _CUDA / "routing_metadata.cu", arch=arch)


def aggregate_source(arch: str = DEFAULT_ARCH) -> CudaSource:
    """Exports `aggregate_rows` for bf16, fp16 and fp32. One artefact serves every model."""
    return CudaSource.make("aggregate", _CUDA / "aggregate.cu", arch=arch)


def cuda_sources(arch: str = DEFAULT_ARCH) -> tuple[CudaSource, ...]:
    """Every CUDA source of routing and aggregation, for warm-up and for the spill check."""
    return routing_metadata_source(arch), aggregate_source(arch)


@provides("routing")
def routing_jobs(spec: ModelSpec, config: ResolvedConfig) -> tuple[CudaSource, ...]:
    """What every training run needs of this package, whatever its model and configuration."""
    return cuda_sources(spec.arch)
