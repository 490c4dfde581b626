"""The CUDA kernels on both sides of the weight-gradient GEMMs as compile jobs: their operands
before, the flush behind.
"""

from __future__ import annotations

from pathlib import Path

from ..config import ResolvedConfig
from ..jit.cuda_source import CudaSource
from ..jit.plan import ModelSpec, provides

_CUDA = Path(__file__).with_name("cuda")


def wgrad_operands_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `gather_transpose_quantize`, `gather_transpose_quantize_pair`, `transpose_codes`. One
    artefact serves every model.
    """
    return CudaSource.make("wgrad_operands", _CUDA / "wgrad_operands.cu", arch=arch)


def flush_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `flush_gradients`. One artefact serves every model."""
    return CudaSource.make("flush", _CUDA / "flush.cu", arch=arch)


@provides("wgrad")
def wgrad_jobs(spec: ModelSpec, config: ResolvedConfig) -> tuple[CudaSource, ...]:
    """The flush of every training run; the operands of those whose weight gradients are computed in
    FP8.
    """
    flush = flush_source(spec.arch)
    return (
        (flush, wgrad_operands_source(spec.arch)) if config.fp8 and config.fp8_wgrad else (flush,)
    )
