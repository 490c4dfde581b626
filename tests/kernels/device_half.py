"""The device half of a CUDA source alone: a third of the time of the whole, and all that the report
of ptxas is about. The host half costs the headers of tvm-ffi and g++, and a loaded module.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kept

from sonicmoe.jit.cache import CompileCache
from sonicmoe.jit.cuda_source import CudaSource
from sonicmoe.jit.toolchain import find_toolkit

REPORT = "ptxas.txt"


def device_report(source: CudaSource, artefacts: CompileCache) -> str:
    """What ptxas reports of the kernels of `source`, compiled as its build compiles them. They are
    not linked and not kept; the report is.
    """
    name, facts = f"{source.name}_device", (source.defines, source.flags)
    key = kept.key_of(name, [*source.files, Path(__file__)], *facts, arch=source.arch)

    def build(folder: Path) -> None:
        (folder / REPORT).write_text(compiled_report(source, folder), encoding="utf-8")

    return artefacts.build(key, build).file(REPORT).read_text(encoding="utf-8")


def compiled_report(source: CudaSource, folder: Path) -> str:
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path

    toolkit = find_toolkit()
    assert toolkit is not None
    request = source._request(folder, toolkit)
    (file,) = request["cuda_files"]
    # Several threads of nvcc take more CPU time for the same machine code.
    asked = [flag for flag in request["extra_cuda_cflags"] if "--split-compile" not in flag]
    virtual = source.arch.replace("sm_", "compute_")
    ours = ["-std=c++17", "-O2", f"-gencode=arch={virtual},code={source.arch}", *asked]
    headers = [find_include_path(), find_dlpack_include_path(), *request["extra_include_paths"]]
    includes = [f"-I{path}" for path in headers]
    done = subprocess.run(
        [toolkit.nvcc, "-cubin", *ours, *includes, file, "-o", os.devnull],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr
