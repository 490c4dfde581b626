"""The toolchain probe: a vector kernel that proves that compiling, caching, loading and launching
work here.
"""

from __future__ import annotations

from pathlib import Path

from .cuda_source import CudaSource


def toolchain_probe(arch: str, threads: int = 256) -> CudaSource:
    """`scale_add(x, y, a)`: y = a * x + y on fp32 vectors [n]; `threads()`: the block size it was
    compiled for.
    """
    source = Path(__file__).with_name("toolchain_probe.cu")
    return CudaSource.make("toolchain_probe", source, defines={"THREADS": threads}, arch=arch)
