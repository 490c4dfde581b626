"""compute-sanitizer over one small forward, backward and step of the Hopper engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import hopper_step
from gpu.device import compiled_beforehand

from sonicmoe.jit.child import search_path

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(SANITIZER).is_file(), reason=f"compute-sanitizer is not at {SANITIZER}"
    ),
]
# One allocation of the driver for every tensor: what lies behind a tensor is then nobody's memory.
# Temporaries of a pass share one, in the order in which they are written: there an access behind a
# temporary is seen behind the last only.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TOOLS = {
    "memcheck": (["--report-api-errors", "no"], UNCACHED, r"ERROR SUMMARY: 0 errors"),
    "racecheck": (
        ["--racecheck-report", "all"],
        {},
        r"RACECHECK SUMMARY: \d+ hazards? displayed \(0 errors, ",
    ),
}


compiled = compiled_beforehand((hopper_step.FP8, (3, 256, 128)))


@pytest.mark.parametrize("tool", TOOLS)
def test_one_step(tool):
    options, variables, clean = TOOLS[tool]
    path = os.pathsep.join([str(ROOT), search_path()])
    env = os.environ | variables | {"PYTHONPATH": path, "SONIC_MOE_FORBID_COMPILE": "1"}
    command = [SANITIZER, "--tool", tool, *options, sys.executable, hopper_step.__file__]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    said = done.stdout + done.stderr
    assert "one step is done" in said, said[-4000:]
    assert re.search(clean, said), said[-8000:]
