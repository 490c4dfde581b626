"""Compile variants of the BF16 GEMMs in one process, each for its own architecture, and print what
came out: `python -P quack_variants.py PTXAS < requests`.

A request is one JSON line `[number, architecture, entry, statics]`; the answer `[number, seconds,
report of ptxas, traffic]`, and `[number, message]` where the compiler refused. One import of CuTe
DSL serves them all.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ptx_report import traffic  # beside this file

from sonicmoe.kernels.blackwell import cute_build


def compile_for(arch: str, folder: Path) -> None:
    """Let CuTe DSL and quack compile for an architecture from now on. A build imports them in an
    environment that names it; here both were imported for another one.
    """
    cute_build.set_environment(arch, folder)
    if "quack" in sys.modules:
        dsl = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()
        dsl.envar.arch = arch
        devices = importlib.import_module("quack.cute_dsl_utils")
        devices.get_compile_target_capacity.cache_clear()
        devices._get_device_capacity_cached.cache_clear()


def build(entry: str, statics: dict[str, Any]) -> str:
    """The PTX of one variant."""
    module, _, function = entry.partition(":")
    text = getattr(importlib.import_module(module), function)(**statics).__ptx__
    return text if isinstance(text, str) else text.decode()


def main(ptxas: str) -> int:
    # tracing makes millions of objects, few of them in cycles: collecting costs a seventh of the
    # time
    gc.disable()
    cute_build.leave_out_graph_compilers()
    with tempfile.TemporaryDirectory() as name:
        folder, ptx = Path(name), Path(name) / "kernel.ptx"
        for line in sys.stdin:
            number, arch, entry, statics = json.loads(line)
            compile_for(arch, folder)
            started = time.process_time()
            try:
                text = build(entry, statics)
            except Exception as error:
                print(json.dumps([number, f"{type(error).__name__}: {error}"]), flush=True)
                continue
            seconds = time.process_time() - started
            ptx.write_text(text, encoding="utf-8")
            command = [ptxas, f"-arch={arch}", "-v", str(ptx), "-o", os.devnull]
            report = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            answer = [number, round(seconds, 2), report, traffic(text).as_json()]
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
