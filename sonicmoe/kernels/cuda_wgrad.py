"""The CUDA kernels on both sides of the weight-gradient GEMMs as compile jobs: their operands
before, the flush behind; and the gradients of biases, which no GEMM computes.
"""

from __future__ import annotations

from pathlib import Path

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


def low_rank_source(arch: str) -> CudaSource:
    """Exports `narrow_rows`, `narrow_gradient`, `narrow_both`, `gradient_parts`, `parts_of_both` and
    `prepare_factor`. One artefact serves every model.
    """
    return CudaSource.make("low_rank", _CUDA / "low_rank.cu", arch=arch)


def flush_source(arch: str) -> CudaSource:
    """Exports `flush_gradients`. One artefact serves every model."""
    return CudaSource.make("flush", _CUDA / "flush.cu", arch=arch)
