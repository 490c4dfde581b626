"""The planted faults stand where they say, so that a run of them plants every one."""

from __future__ import annotations

import json

from processes import ROOT, program


def test_code_that_moves_takes_its_fault_along() -> None:
    tool = program("ci/planted_faults.py")
    problems = {fault.name: fault.problem(ROOT) for fault in tool.read_faults()}
    assert not {name: words for name, words in problems.items() if words}
    assert set(json.loads(tool.CAUGHT.read_text())) <= problems.keys()
