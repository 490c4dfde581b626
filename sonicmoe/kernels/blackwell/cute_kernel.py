"""CuTe DSL kernels: compiled ahead of time to a shared object, cached, and loaded without CuTe DSL.

Cross-compiles without a GPU. Loading needs apache-tvm-ffi and the driver, neither CuTe DSL nor a
CUDA toolkit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...jit.child import run_build_script
from ...jit.key import CompileKey, package_versions, source_fingerprint
from ...jit.manifest import Artefact
from ...jit.shared_object import SharedObject, runtime_fingerprint
from ...jit.toolchain import CudaToolkit, find_toolkit

_BUILD_SCRIPT = Path(__file__).with_name("cute_build.py")
# Exported kernels call two functions of the CuTe DSL library when a launch fails. This file
# replaces both, so the library itself need not be loaded.
_ERROR_REPORTERS = Path(__file__).with_name("cute_runtime_errors.c")


@dataclass(frozen=True)
class CuteKernel(SharedObject):
    """One exported function `name`.

    Attributes:
        name: kernel name of the key, name of the exported function and stem of the shared object.
        entry: "package.module:function"; called with `statics` in a build process, it returns what
            `cute.compile(..., options="--enable-tvm-ffi")` returns. Compile for fake tensors with
            symbolic token counts.
        statics: static model dimensions, dtype names, tile. Never a token count.
        sources: Python files, or directories of them, that the generated code depends on.
        arch: for example "sm_90a".
        packages: whose versions decide the generated code.
        effort_s: as of `CudaSource`.
    """

    name: str
    entry: str
    statics: tuple[tuple[str, Any], ...]
    sources: tuple[Path, ...]
    arch: str
    packages: tuple[str, ...] = ("nvidia-cutlass-dsl", "quack-kernels")
    effort_s: float = field(default=12.0, compare=False)

    @classmethod
    def make(
        cls, name: str, entry: str, statics: Mapping[str, Any], *sources: Path | str, **rest: Any
    ) -> CuteKernel:
        """A kernel of a mapping of statics and of plain paths."""
        return cls(
            name,
            entry,
            tuple(sorted(statics.items())),
            tuple(Path(path) for path in sources),
            **rest,
        )

    def key(self) -> CompileKey:
        """The compile key; its toolchain is None where CuTe DSL or the CUDA toolkit is missing."""
        files = [
            file
            for path in self.sources
            for file in (path.rglob("*.py") if path.is_dir() else [path])
        ]
        return CompileKey.make(
            self.name,
            arch=self.arch,
            # The entry decides which builder runs on the statics, so two builders with equal
            # statics need two keys.
            statics={**dict(self.statics), "entry": self.entry},
            # The reporters are linked into the object, so a change of them is one of the artefact.
            fingerprint=runtime_fingerprint(source_fingerprint([*files, _ERROR_REPORTERS])),
            toolchain=self._toolchain(),
        )

    def load_artefact(self, artefact: Artefact) -> Any:
        """The `tvm_ffi.Function` of a verified artefact."""
        return super().load_artefact(artefact).get_function(self.name)

    def _build(self, scratch: Path, toolkit: CudaToolkit) -> str:
        """In a process of its own."""
        request = {
            "name": self.name, "entry": self.entry, "statics": dict(self.statics), "arch": self.arch,
            "packages": self.packages, "build_directory": str(scratch), "error_reporters": str(_ERROR_REPORTERS),
            # The build process gets both paths from here, because it must not search for a toolkit
            # on its own and find another one than the key names.
            "ptxas": str(toolkit.home / "bin" / "ptxas"), "cuda_lib": str(toolkit.home / "lib64"),
        }  # fmt: skip
        return run_build_script(self.name, _BUILD_SCRIPT, request, {})

    def _toolchain(self) -> dict[str, str] | None:
        versions, toolkit = dict(package_versions(*self.packages)), find_toolkit()
        # Both are needed for a build: CuTe DSL generates the code, and the toolkit brings ptxas for
        # the report and the static CUDA runtime for the link.
        if toolkit is None or versions.get("nvidia-cutlass-dsl", "absent") == "absent":
            return None
        return {**versions, "cuda": toolkit.version}
