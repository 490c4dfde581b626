"""Run one `tvm_ffi.cpp.build` in a process of its own: `python -P tvm_ffi_build.py REQUEST.json`.

A script and not part of the package's import graph: tvm_ffi takes the architecture and CUDA_HOME
from the process environment, remembers the first answer for good, and imports PyTorch where it
finds it. None of that belongs in a training process. Prints the compiler's output; the last line of
a success is the path of the shared object.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path


def main(request_path: str) -> int:
    """Build the library that the request file describes; returns the exit status."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi then takes it for not installed: 1 s less
    import tvm_ffi.cpp

    # The parent process reads standard output only, so log lines go there, too.
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    try:
        library = tvm_ffi.cpp.build(backend="cuda", **request)
    except RuntimeError as error:
        print(error)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
