"""The CUDA quantisers of MXFP8 as a compile job."""

from __future__ import annotations

from pathlib import Path

from ..jit.cuda_source import CudaSource

_CUDA = Path(__file__).with_name("cuda")


def mx_quantize_source(arch: str) -> CudaSource:
    """Exports `quantize_rows_iso32` and, for weights, `store_addresses`, `num_checksums`,
    `check_weights`, `quantize_weights_iso32`. One artefact serves every model: sizes are launch
    arguments.
    """
    files = (_CUDA / name for name in ("mx_rows.cu", "mx_weights.cu", "weight_guard.cu"))
    return CudaSource.make("mx_quantize", *files, arch=arch)
