"""The CUDA quantisers of row scales as a compile job."""

from __future__ import annotations

from pathlib import Path

from ..jit.cuda_source import CudaSource

_CUDA = Path(__file__).with_name("cuda")


def quantize_source(arch: str) -> CudaSource:
    """Exports `quantize_rows`, `transpose_bytes` and, for weights, `store_addresses`,
    `num_checksums`, `check_weights`, `quantize_weights`. One artefact serves every model: sizes are
    launch arguments.
    """
    names = "quantize.cu", "quantize_weights.cu", "weight_guard.cu"
    files = (_CUDA / name for name in names)
    return CudaSource.make("quantize", *files, arch=arch, effort_s=16.0)
