"""Compile one CuTe DSL kernel ahead of time, in a process of its own: `python -P cute_build.py
REQUEST.json`.

A script and not part of the package's import graph: CuTe DSL takes the architecture from the
environment when it is imported, compiles on one thread, and is far too heavy for a process that
only wants to launch cached kernels. Prints a ptxas report and the linker's output.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(request_path: str) -> int:
    """Build the kernel that the request file describes; returns the exit status."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    folder = Path(request["build_directory"])
    # Set before the import below, because CuTe DSL reads it when it is imported.
    set_environment(request["arch"], folder)
    if "quack-kernels" in request["packages"]:
        leave_out_graph_compilers()
    module, _, function = request["entry"].partition(":")
    compiled = getattr(importlib.import_module(module), function)(**request["statics"])
    # The object holds the cubin and a launcher under the given function name; `link` turns it into
    # a shared object.
    exported = folder / "kernel.o"
    compiled.export_to_c(object_file_path=str(exported), function_name=request["name"])
    report_resources(compiled, folder, request)
    return link(exported, folder, request)


def set_environment(arch: str, folder: Path) -> None:
    """For CuTe DSL and quack, which read it when they are imported."""
    os.environ["CUTE_DSL_ARCH"] = arch
    # quack would otherwise ask a GPU, which need not be here.
    os.environ["QUACK_ARCH"] = arch.removeprefix("sm_").rstrip("af")
    # The compiler keeps the PTX that `report_resources` assembles.
    os.environ["CUTE_DSL_KEEP"] = "ptx"
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder)


def leave_out_graph_compilers() -> None:
    """Make the decorators of `torch.compile` do nothing in this process.

    quack decorates PyTorch functions of its own when it is imported. PyTorch would import Inductor
    for that, which takes a sixth of a build, and a build calls none of these functions.
    """
    torch: Any = importlib.import_module("torch")  # quack imports it anyway

    def undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if callable(function) else lambda decorated: decorated

    torch.compile = torch.compiler.disable = undecorated


def report_resources(compiled: Any, folder: Path, request: dict[str, Any]) -> None:
    """Assemble the kernel's PTX once more and print the report of ptxas; CuTe DSL shows none of its
    own run.
    """
    ptx = folder / "kernel.ptx"
    text = compiled.__ptx__
    ptx.write_text(text if isinstance(text, str) else text.decode(), encoding="utf-8")
    command = [request["ptxas"], f"-arch={request['arch']}", "-v", str(ptx), "-o", os.devnull]
    # ptxas writes its report to standard error. Its exit status does not matter: the kernel is
    # compiled already, and a failed report is an empty one.
    print(subprocess.run(command, capture_output=True, text=True, check=False).stderr, flush=True)


def link(exported: Path, folder: Path, request: dict[str, Any]) -> int:
    """Link the object with the static runtimes, so that loading it needs tvm_ffi and the driver
    only.
    """
    import cutlass.runtime
    import tvm_ffi.cpp

    # The static library lies beside the shared one. Linking it in makes the artefact independent of
    # the CuTe DSL package.
    runtime = Path(cutlass.runtime.find_runtime_libraries(enable_tvm_ffi=False)[0]).parent
    try:
        library = tvm_ffi.cpp.build(
            request["name"],
            sources=[str(exported), request["error_reporters"]],
            extra_ldflags=[
                str(runtime / "libcuda_dialect_runtime_static.a"),
                f"-L{request['cuda_lib']}",
                "-lcudart_static -ldl -lrt -lpthread",
            ],
            build_directory=str(folder),
        )
    except RuntimeError as error:
        print(error)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
