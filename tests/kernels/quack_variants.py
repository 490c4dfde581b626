"""Compile variants of the BF16 GEMMs in one process and print what ptxas says: `python -P
quack_variants.py ARCH PTXAS < requests`.

A request is one JSON line `[number, entry, statics]`; the answer `[number, report]`. One import of
CuTe DSL serves them all.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sonicmoe.jit import cute_build


def main(arch: str, ptxas: str) -> int:
    # tracing makes millions of objects, few of them in cycles: collecting costs a seventh of the
    # time
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        # As a build does; importing quack takes a quarter less without the graph compilers.
        cute_build.set_environment(arch, Path(folder))
        cute_build.leave_out_graph_compilers()
        ptx = Path(folder) / "kernel.ptx"
        for line in sys.stdin:
            number, entry, statics = json.loads(line)
            module, _, function = entry.partition(":")
            text = getattr(importlib.import_module(module), function)(**statics).__ptx__
            ptx.write_text(text if isinstance(text, str) else text.decode(), encoding="utf-8")
            command = [ptxas, f"-arch={arch}", "-v", str(ptx), "-o", os.devnull]
            report = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            print(json.dumps([number, report]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
