"""The CUDA quantisers as a compile job."""

from __future__ import annotations

from pathlib import Path

from ..config import ResolvedConfig
from ..jit.cuda_source import CudaSource
from ..jit.plan import ModelSpec, provides

_CUDA = Path(__file__).with_name("cuda")


def quantize_source(arch: str = "sm_90a") -> CudaSource:
    """Exports `quantize_rows`, `transpose_bytes` and, for weights, `store_addresses`,
    `num_checksums`, `check_weights`, `quantize_weights`. One artefact serves every model: sizes are
    launch arguments.
    """
    files = (_CUDA / name for name in ("quantize.cu", "quantize_weights.cu", "weight_guard.cu"))
    return CudaSource.make("quantize", *files, arch=arch)


@provides("quantize")
def quantize_jobs(spec: ModelSpec, config: ResolvedConfig) -> tuple[CudaSource, ...]:
    """What every FP8 run needs, whatever its model."""
    return (quantize_source(spec.arch),) if config.fp8 else ()
