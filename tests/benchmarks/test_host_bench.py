"""The instrument for host time runs where there is no GPU, and what it counts does not grow with
the experts.
"""

from __future__ import annotations

import importlib.util
import json
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


def run(artefacts, *options):
    """What the benchmark printed."""
    directories = {
        "SONIC_MOE_CACHE_DIR": str(artefacts.root),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(artefacts.local_root),
    }
    program = ROOT / "benchmarks" / "host_bench.py"
    process = processes.of_checkout(program, "--steps", 2, *options, **directories)
    assert process.returncode == 0, process.stderr
    return process.stdout


def measure(artefacts, *options):
    """`(microseconds, allocations)` per layer for each number of experts."""
    found = re.findall(
        r": (\d+) us per layer at best, median \d+; (\d+) allocations", run(artefacts, *options)
    )
    return [(int(best), int(allocations)) for best, allocations in found]


@pytest.mark.parametrize(
    "options",
    [
        ["--face", "node", "--face", "grad", "--face", "stacked"],
        ["--precision", "bf16", "--face", "node", "--face", "grad", "--face", "stacked"],
        pytest.param(["--framework", "paddle"], marks=pytest.mark.paddle),
    ],
    ids=["direct", "bf16", "paddle"],
)
def test_allocations_do_not_grow_with_the_experts(artefacts, options):
    found = measure(artefacts, "--experts", "2", "--experts", "16", *options)
    assert len(found) == 2 * max(1, options.count("--face"))
    for few, many in zip(found[::2], found[1::2], strict=True):
        assert few[0] > 0 and 0 < few[1] == many[1] <= 23


def test_calls_do_not_grow_with_the_experts(artefacts):
    pytest.importorskip("transformers", minversion="5.7")
    faces = ("node", "step", "stacked", "MoE", "transformers", "written", "frozen")
    options = [option for face in faces for option in ("--face", face)]
    counts = json.loads(run(artefacts, "--count", "--experts", "8", "--experts", "64", *options))
    for face in faces:
        few, many = (counts[f"{face}, E={experts}"] for experts in (8, 64))
        assert 0 < few == pytest.approx(many, rel=0.02), face
    assert counts["frozen, E=64"] < counts["transformers, E=64"]
