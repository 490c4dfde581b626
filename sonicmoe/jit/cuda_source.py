"""CUDA sources: compiled by nvcc through apache-tvm-ffi, cached, and loaded as tvm-ffi modules.

Cross-compiles: neither a GPU nor a framework is needed to build, and the result loads without a
GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import run_build_script
from .key import CompileKey, source_fingerprint
from .shared_object import SharedObject, runtime_fingerprint
from .toolchain import CudaToolkit, find_toolkit

_FIRST_THAT_SPLITS, _SPLIT_THREADS = (12, 3), 4
# What the static runtime calls on older C libraries. Its own names stay inside the object: those of a
# framework's runtime, which may be another version, would otherwise take their place.
_STATIC = ["-Wl,--exclude-libs,libcudart.a", "-ldl", "-lrt", "-lpthread"]
_BUILD_SCRIPT = Path(__file__).with_name("tvm_ffi_build.py")


@dataclass(frozen=True)
class CudaSource(SharedObject):
    """One shared object made of CUDA sources that export functions with
    `TVM_FFI_DLL_EXPORT_TYPED_FUNC`.

    Attributes:
        name: kernel name of the key, and stem of the shared object.
        files: the `.cu` files, compiled as one translation unit; headers they include in quotes
            count into the fingerprint by themselves.
        arch: "sm_90a" compiles for exactly that (`-gencode=arch=compute_90a,code=sm_90a`).
        defines: preprocessor macros of static model dimensions: ("E", 8) becomes `-DE=8`. Never a
            token count.
        flags: further nvcc flags; `-O2` (host) and the resource report are always on.
        include_dirs: searched for quoted headers.
        split: several threads of nvcc share the kernels of a file. Only for sources whose machine
            code is the same either way; not part of the key.
        lineinfo: profilers can name source lines. A third of the size and no other machine code, so
            not part of the key.
        effort_s: CPU time of the compile, roughly; decides the order in which many are compiled.
    """

    name: str
    files: tuple[Path, ...]
    arch: str
    defines: tuple[tuple[str, int | str], ...] = ()
    flags: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = field(default=())
    split: bool = field(default=False, compare=False)
    lineinfo: bool = field(default=True, compare=False)
    effort_s: float = field(default=10.0, compare=False)

    @classmethod
    def make(
        cls,
        name: str,
        *files: Path | str,
        defines: Mapping[str, int | str] | None = None,
        **rest: Any,
    ) -> CudaSource:
        """The same with plain paths and a mapping of macros."""
        return cls(
            name,
            tuple(Path(file) for file in files),
            defines=tuple(sorted((defines or {}).items())),
            **rest,
        )

    def key(self) -> CompileKey:
        """The compile key; its toolchain is None where there is no nvcc."""
        toolkit = find_toolkit()
        return CompileKey.make(
            self.name,
            arch=self.arch,
            statics={**dict(self.defines), "flags": self.flags},
            fingerprint=runtime_fingerprint(source_fingerprint(self.files, self.include_dirs)),
            toolchain={"nvcc": toolkit.version} if toolkit else None,
        )

    def _build(self, scratch: Path, toolkit: CudaToolkit) -> str:
        request, environment = self._request(scratch, toolkit), self._environment(toolkit.home)
        if toolkit.static_runtime is not None:
            # tvm_ffi links `-lcudart` in this directory. The linker takes the first one that has a
            # library of that name, and `.` is in front of the toolkit's.
            (scratch / "libcudart.a").symlink_to(toolkit.static_runtime)
            environment["CXX"] = f"{os.environ.get('CXX', 'c++')} -L."
        return run_build_script(self.name, _BUILD_SCRIPT, request, environment)

    def _request(self, scratch: Path, toolkit: CudaToolkit) -> dict[str, Any]:
        splits = self.split and toolkit.release >= _FIRST_THAT_SPLITS
        split = [f"--split-compile={_SPLIT_THREADS}"] if splits else []
        lines = ["-lineinfo"] if self.lineinfo else []
        defines = [f"-D{name}={value}" for name, value in self.defines]
        own_runtime = [f"-Wl,-rpath,{toolkit.home / 'lib64'}"]
        return {
            "name": self.name,
            "cuda_files": [str(self._unit(scratch))],
            # `-Xptxas -v` writes the resource report from which the kernel gate learns of spills.
            "extra_cuda_cflags": [*lines, "-Xptxas", "-v", *split, *defines, *self.flags],
            "extra_ldflags": _STATIC if toolkit.static_runtime else own_runtime,
            "extra_include_paths": [str(path) for path in self.include_dirs],
            "build_directory": str(scratch),
        }

    def _unit(self, scratch: Path) -> Path:
        """What nvcc compiles: the file, or one that includes all of them.

        The headers of tvm-ffi cost 5 s of CPU in every translation unit, kernels mostly less.
        """
        if len(self.files) == 1:
            return self.files[0].resolve()
        unit = scratch / f"{self.name}.cu"
        lines = [f'#include "{file.resolve()}"\n' for file in self.files]
        unit.write_text("".join(lines), encoding="utf-8")
        return unit

    def _environment(self, cuda_home: Path) -> dict[str, str]:
        major_minor = self.arch.removeprefix("sm_")
        # "sm_90a" becomes "9.0a", and "sm_100a" "10.0a": the last digit is the minor version.
        # tvm_ffi turns it into the -gencode flag.
        digits, suffix = major_minor.rstrip("af"), major_minor[len(major_minor.rstrip("af")) :]
        return {
            "CUDA_HOME": str(cuda_home),
            "TVM_FFI_CUDA_ARCH_LIST": f"{digits[:-1]}.{digits[-1]}{suffix}",
            "TVM_FFI_CPP_EXTENSION_LOG_BUILD": "stdout",
        }
