"""Host code in C++ that no architecture binds: passes, the handles they take, argument checks,
tensor maps. Headers end in `.hpp`, device code in `.cuh`.
"""

from __future__ import annotations

from pathlib import Path

from ...jit.cuda_source import CudaSource

_HERE = Path(__file__).parent


def passes_source(arch: str) -> CudaSource:
    """Exports the passes, which launch the kernels of other sources, and holds no kernel. One
    artefact serves every model.
    """
    return CudaSource.make("passes", _HERE / "passes.cpp", arch=arch)
