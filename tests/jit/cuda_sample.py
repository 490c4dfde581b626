"""A vector kernel that compiles in a moment; the benchmark of the cache measures it, too."""

from __future__ import annotations

from worlds import ROOT

from sonicmoe.jit.cuda_source import CudaSource


def toolchain_probe(arch: str, threads: int = 256) -> CudaSource:
    """`scale_add(x, y, a)`: y = a * x + y on fp32 vectors [n]; `threads()`: the block size it was
    compiled for.
    """
    source = ROOT / "benchmarks" / "toolchain_probe.cu"
    return CudaSource.make("toolchain_probe", source, defines={"THREADS": threads}, arch=arch)
