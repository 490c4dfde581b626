"""The CUDA quantisers as compile jobs."""

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


def mx_quantize_source(arch: str) -> CudaSource:
    """The same of MXFP8: exports `quantize_rows_iso32` and, for weights, `store_addresses`,
    `num_checksums`, `check_weights`, `quantize_weights_iso32`.
    """
    files = (_CUDA / name for name in ("mx_rows.cu", "mx_weights.cu", "weight_guard.cu"))
    return CudaSource.make("mx_quantize", *files, arch=arch)
