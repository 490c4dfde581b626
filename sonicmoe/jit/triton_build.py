"""Compile one Triton kernel in a process of its own: `python -P triton_build.py REQUEST.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sonicmoe.jit.triton_variant import build

if __name__ == "__main__":
    build(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
