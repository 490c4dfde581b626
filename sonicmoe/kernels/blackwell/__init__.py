"""Kernels for Blackwell: BF16 GEMMs of quack-kernels (`quack_gemm.py`), MXFP8 GEMMs on their builders
(`mx_gemm.py`), MXFP8 quantisers in CUDA, and the compile job of CuTe DSL kernels
(`cute_kernel.py`). No path of another architecture leads here.
"""

from __future__ import annotations

from pathlib import Path

from ...jit.cuda_source import CudaSource

_HERE = Path(__file__).parent


def mx_quantize_source(arch: str) -> CudaSource:
    """Exports `quantize_rows_iso32` and, for weights, `store_addresses`, `num_checksums`,
    `check_weights`, `quantize_weights_iso32`. One artefact serves every model.
    """
    guard = _HERE.with_name("cuda") / "weight_guard.cu"
    files = (_HERE / "mx_rows.cu", _HERE / "mx_weights.cu", guard)
    return CudaSource.make("mx_quantize", *files, arch=arch)
