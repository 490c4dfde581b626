"""GPU kernels: CUDA C++ sources (`cuda/`) and their Triton counterparts. No policy, no framework,
no caching.

The kernels of an engine are listed in its record (`engine/capabilities.py`); `EVERY_RUN` lists
those that every run needs, whichever engine it chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..architectures import ARCHITECTURES
from ..jit.cuda_source import CudaSource
from .cuda_wgrad import flush_source

_CUDA = Path(__file__).with_name("cuda")


def routing_metadata_source(arch: str) -> CudaSource:
    """Exports `build_metadata`, `build_sorted`, `gather_or_zero`, `sum_or_zero`,
    `scratch_bytes`, `max_experts`. One artefact serves every model.
    """
    known = ARCHITECTURES.get(arch)
    # Its tiles are as large as the shared memory of a block lets them be.
    defines = {"SHARED_KIB": known.shared_kib} if known is not None else {}
    files = _CUDA / "routing_metadata.cu", _CUDA / "sorted_rows.cu"
    return CudaSource.make("routing_metadata", *files, defines=defines, arch=arch)


def aggregate_source(arch: str) -> CudaSource:
    """Exports `aggregate_rows` for bf16, fp16 and fp32. One artefact serves every model."""
    return CudaSource.make("aggregate", _CUDA / "aggregate.cu", arch=arch)


def peer_rows_source(arch: str) -> CudaSource:
    """Exports `half_bytes`, `send`, `take`, `again`, `back`: rows between the GPUs of one host. One
    artefact serves every model.
    """
    return CudaSource.make("peer_rows", _CUDA / "peer_rows.cu", arch=arch)


def cuda_sources(arch: str) -> tuple[CudaSource, ...]:
    """The CUDA sources of routing and aggregation, which every layer on a GPU launches."""
    return routing_metadata_source(arch), aggregate_source(arch)


# From an architecture to a source.
EVERY_RUN: tuple[Callable[[str], CudaSource], ...] = (
    routing_metadata_source,
    aggregate_source,
    flush_source,
    peer_rows_source,
)
