"""The instrument for host time runs where there is no GPU, and the allocations that it counts do not
grow with the experts. tools/ci/baselines.json has the calls of functions.
"""

from __future__ import annotations

import importlib.util
import re

import processes
import pytest
from processes import ROOT

from sonicmoe.jit.toolchain import find_toolkit

pytestmark = [
    pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc"),
    pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"),
]


@pytest.mark.parametrize(
    "options",
    [
        ["--face=node", "--face=grad", "--face=stacked", "--precision=fp8", "--precision=bf16"],
        pytest.param(["--framework=paddle"], marks=pytest.mark.paddle),
    ],
    ids=["torch", "paddle"],
)
def test_allocations_do_not_grow_with_the_experts(artefacts, options):
    directories = {
        "SONIC_MOE_CACHE_DIR": str(artefacts.root),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(artefacts.local_root),
    }
    program, experts = ROOT / "benchmarks" / "host_bench.py", ("--experts=2", "--experts=16")
    process = processes.of_checkout(program, "--steps", 2, *experts, *options, **directories)
    assert process.returncode == 0, process.stderr
    shown = r": (\d+) us per layer at best, median \d+; (\d+) allocations"
    found = [(int(us), int(made)) for us, made in re.findall(shown, process.stdout)]
    assert len(found) == (12 if len(options) > 1 else 2)
    for few, many in zip(found[::2], found[1::2], strict=True):
        assert few[0] > 0 and 0 < few[1] == many[1] <= 23
