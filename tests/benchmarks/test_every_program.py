"""Every program loads on a machine without a GPU, says how it is used, and asks for a GPU where it needs one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from worlds import ROOT

PROGRAMS = sorted(
    path.stem
    for path in Path(ROOT, "benchmarks").glob("*.py")
    if "@click.command" in path.read_text()
)
NEED_A_GPU = ("small_batch_bench", "deepgemm_bench")
NEEDS = {"adapters_bench": "peft", "frozen_bench": "peft", "host_bench": "tvm_ffi"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_loads_and_has_help(run, name):
    if importlib.util.find_spec(NEEDS.get(name, "transformers")) is None:
        pytest.skip(f"needs {NEEDS.get(name, 'transformers')}")
    assert "Usage: " in run(name, "--help")
    if name in NEED_A_GPU:
        assert "this needs an NVIDIA Hopper GPU" in run(name, exit_code=1)
