"""The CUDA kernels on both sides of the weight-gradient GEMMs as compile jobs: their operands
before, the flush behind; and sums over rows, which no GEMM computes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ..jit.cuda_source import CudaSource

_CUDA = Path(__file__).with_name("cuda")


def wgrad_operands_source(arch: str) -> CudaSource:
    """Exports `gather_transpose_quantize`, `gather_transpose_quantize_pair`,
    `gather_transpose_requantize`. One artefact serves every model.
    """
    return CudaSource.make("wgrad_operands", _CUDA / "wgrad_operands.cu", arch=arch)


def bias_gradients_source(arch: str) -> CudaSource:
    """Exports `sum_tokens` and `sum_dz`. One artefact serves every model."""
    return CudaSource.make("bias_gradients", _CUDA / "bias_gradients.cu", arch=arch)


def expert_rows_source(arch: str) -> CudaSource:
    """Exports `index_rows`, `gather_rows`, `row_sums`, `column_sums`. One artefact serves every model."""
    return CudaSource.make("expert_rows", _CUDA / "expert_rows.cu", arch=arch)


@lru_cache(maxsize=8)
def expert_rows_module(arch: str) -> Any:
    """The process's loaded `expert_rows_source`; errors as `CudaSource.load`."""
    return expert_rows_source(arch).load()


def low_rank_source(arch: str) -> CudaSource:
    """Exports `narrow_rows`, `narrow_gradient`, `narrow_both`, `gradient_parts`, `parts_of_both` and
    `prepare_factor`. One artefact serves every model.
    """
    return CudaSource.make("low_rank", _CUDA / "low_rank.cu", arch=arch)


def flush_source(arch: str) -> CudaSource:
    """Exports `flush_gradients`. One artefact serves every model."""
    return CudaSource.make("flush", _CUDA / "flush.cu", arch=arch)
