"""A compile job whose artefact is one shared object, loaded by apache-tvm-ffi: what `CudaSource` and
`CuteKernel` have in common.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .cache import CompileCache, default_cache
from .errors import CompileError
from .key import CompileKey, host_abi, package_versions
from .manifest import Artefact
from .store import SCRATCH
from .toolchain import CudaToolkit, find_toolkit

BUILD_LOG = "build.log"


class SharedObject:
    """`<name>.so` and the log of its build. Subclasses say the key and how to build."""

    name: str

    def key(self) -> CompileKey:
        """The compile key; its toolchain is None where its compilers are not installed."""
        raise NotImplementedError

    def _build(self, scratch: Path, toolkit: CudaToolkit) -> str:
        """Leave `<name>.so` in `scratch`; returns what the build printed."""
        raise NotImplementedError

    def compile(self, cache: CompileCache | None = None) -> Artefact:
        """The published artefact, built if needed; errors as `CompileCache.build`, and CompileError
        of the compiler.
        """
        return (cache or default_cache()).build(self.key(), self.build_into)

    def load(self, cache: CompileCache | None = None) -> Any:
        """What `load_artefact` makes of it, built if needed and remembered by the cache; errors as
        `CompileCache.get`.
        """
        return (cache or default_cache()).get(self.key(), self.build_into, self.load_artefact)

    def load_artefact(self, artefact: Artefact) -> Any:
        """The loaded `tvm_ffi.Module` of a verified artefact."""
        # Imported here and not at the top: machines that only plan or check a warm-up have no
        # tvm_ffi.
        import tvm_ffi

        return tvm_ffi.load_module(str(artefact.file(f"{self.name}.so")))

    def build_into(self, folder: Path) -> None:
        """Build, and leave `<name>.so` and the build log in `folder`. CompileError, with its words,
        where a compiler or the linker refused, or there is no CUDA toolkit.
        """
        toolkit = find_toolkit()
        if toolkit is None:
            raise CompileError(f"{self.name}: no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda")
        # The store removes the scratch directory before it publishes, so only the shared object and
        # the log are copied out of it.
        scratch = folder / SCRATCH
        scratch.mkdir()
        log = self._build(scratch, toolkit)
        shutil.copyfile(scratch / f"{self.name}.so", folder / f"{self.name}.so")
        (folder / BUILD_LOG).write_text(log, encoding="utf-8")


def runtime_fingerprint(sources: str) -> dict[str, str]:
    """What an object depends on besides its compilers: the digest of its sources, and this host."""
    # An object is built against the headers of one version of apache-tvm-ffi and calls into the
    # installed one, which is why that version stands here and not in the toolchain: an upgrade is
    # a miss and not a crash, also where no compiler is.
    return {"sources": sources, "abi": host_abi(), **dict(package_versions("apache-tvm-ffi"))}
