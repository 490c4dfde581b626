"""Captures of PaddleFleet's calls, whose weights may be in either layout; test_who_is_named.py has the
names of their operands. Also under PyTorch.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from engine.moe_golden import make_problem
from findings import captured_calls, measured
from fleet.fleet_calls import Experts
from framework import IS_PADDLE

from sonicmoe.cli.main import main
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.capture import dump
from sonicmoe.diagnostics.step_dump import load_dump, save_dump

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
FRAMEWORK = ["--framework", "paddle" if IS_PADDLE else "torch"]


@pytest.mark.parametrize(("layout", "fp8"), [("sonic", True), ("grouped", False)])
def test_dumped_by_a_weight_captured_bisected_measured(layout, fp8, tmp_path):
    experts, other = Experts(make_problem(), layout), Experts(make_problem(), layout)
    path = tmp_path / "step.npz"
    dump(experts.weights[0], path)
    other.call(fp8=fp8).backward()
    assert not path.exists()
    with captured_calls("call") as cases:
        experts.call(fp8=fp8).backward()
    step = load_dump(path)
    assert step.dout is not None and bisect(step, "reference").healthy
    (case,) = cases
    assert case.caller == step.caller
    save_dump(tmp_path / "case.npz", case)
    for file in (path, tmp_path / "case.npz"):
        result = CliRunner().invoke(main, ["bisect", str(file), "--json", *FRAMEWORK])
        assert result.exit_code == 0, result.output
        measured(file, bound=0.15)
