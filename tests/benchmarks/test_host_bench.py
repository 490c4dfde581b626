"""The instrument for host time runs where there is no GPU, and what it counts does not grow with
the experts.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import processes
import pytest

from sonicmoe.jit.toolchain import find_toolkit

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc"),
    pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"),
]


def measure(artefacts, *options):
    """`(microseconds, allocations)` per layer for each number of experts."""
    directories = {
        "SONIC_MOE_CACHE_DIR": str(artefacts.root),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(artefacts.local_root),
    }
    command = [str(ROOT / "benchmarks" / "host_bench.py"), "--steps", "2", *options]
    process = processes.run(command, os.environ | directories, ROOT, 300)
    assert process.returncode == 0, process.stderr
    found = re.findall(
        r": (\d+) us per layer at best, median \d+; (\d+) allocations", process.stdout
    )
    return [(int(best), int(allocations)) for best, allocations in found]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--stacked"],
        ["--flush", "step"],
        pytest.param(["--framework", "paddle"], marks=pytest.mark.paddle),
    ],
    ids=["per expert", "stacked", "accumulators", "paddle"],
)
def test_allocations_do_not_grow_with_the_experts(artefacts, options):
    few, many = measure(artefacts, "--experts", "2", "--experts", "16", *options)
    assert few[0] > 0 and 0 < few[1] == many[1] <= 23
