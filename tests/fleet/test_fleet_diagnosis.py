"""Diagnosis of PaddleFleet's calls, whose weights may be in either layout: found by the names that
they have at the call. Also under PyTorch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from engine.moe_golden import make_problem
from findings import captured_calls, found, measured
from fleet.fleet_calls import LAYOUTS, Experts
from framework import IS_PADDLE, torch
from pairwise import pairwise

from sonicmoe.cli.main import main
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.capture import dump
from sonicmoe.diagnostics.step_dump import load_dump, save_dump

if IS_PADDLE:
    import paddle

    Module = paddle.nn.Layer
else:
    Module = torch.nn.Module

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
FRAMEWORK = ["--framework", "paddle" if IS_PADDLE else "torch"]


class Layer(Module):
    """Holds the two weights, as Fleet's experts do."""

    def __init__(self, experts):
        super().__init__()
        self.weight1, self.weight2 = experts.weights


def spoiled(array, *index):
    array = np.array(array)
    array[index] = np.nan
    return array


@pytest.mark.parametrize(("layout", "held", "fp8"), pairwise(LAYOUTS, [False, True], [False, True]))
def test_a_weight_is_named(layout, held, fp8):
    problem = make_problem()
    inner = problem.intermediate
    # Up row 3 of expert 1, and column 5 of H: [E, H, 2I], gate half first.
    up_gate = spoiled(problem.up_gate, 1, 5, inner + 3)
    experts = Experts(replace(problem, up_gate=up_gate), layout)
    model = Layer(experts) if held else None
    text = str(found(lambda: experts.call(fp8=fp8)))
    name = "weight1" if model is not None else "w1"
    assert f"first bad: input w1 = {name} at expert 1, row 7, column 5: nan" in text


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
