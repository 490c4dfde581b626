"""The planted faults stand where they say, so that a run of them plants every one."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
from processes import ROOT


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "ci" / "planted_faults.py"
    spec = importlib.util.spec_from_file_location("planted_faults", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["planted_faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_that_moves_takes_its_fault_along(tool: ModuleType) -> None:
    problems = {fault.name: fault.problem(ROOT) for fault in tool.read_faults()}
    assert not {name: words for name, words in problems.items() if words}
    assert set(json.loads(tool.CAUGHT.read_text())) <= problems.keys()
