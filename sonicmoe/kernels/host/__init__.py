"""Host code in C++ that no architecture binds: the executor of programs, argument checks, tensor
maps. Headers end in `.hpp`, device code in `.cuh`.
"""

from __future__ import annotations

from pathlib import Path

from ...jit.cuda_source import CudaSource

_HERE = Path(__file__).parent


def program_source(arch: str) -> CudaSource:
    """Exports what replays lists of launches of the kernels of other sources, and holds neither a
    list nor a kernel. One artefact serves every model.
    """
    return CudaSource.make("program", _HERE / "program.cpp", arch=arch)
