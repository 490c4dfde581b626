"""`detect_nonfinite` and dumps of a node's step that fail, in a training loop; nothing is left behind outside
the block. Also under Paddle.
"""

import errno
import logging

import numpy as np
import pytest
from engine.moe_golden import make_problem
from findings import found
from framework import torch
from node.node_harness import Layer

from sonicmoe import SonicMoEConfig, observe
from sonicmoe.diagnostics import capture
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.nonfinite import detect_nonfinite
from sonicmoe.diagnostics.step_dump import DumpError, load_dump
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import EngineChoice

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
# Expert 2 has no token.
PROBLEM = make_problem(hidden=128, intermediate=128, empty=(2,))


def make_layer(mode="perf", problem=PROBLEM, **options):
    config = SonicMoEConfig(fp8_mode=mode)
    return Layer(problem, dtype=torch.bfloat16, main_grad=None, config=config, **options)


def spoiled(array, value, *place):
    bad = np.array(array)
    bad[place] = value
    return bad


def test_a_bad_token_is_named_in_forward(tmp_path):
    bad = PROBLEM.but(x=spoiled(PROBLEM.x, np.inf, 17, 5))

    def step():
        make_layer().step(bad)

    error = found(step, "first bad: input x at token 17, column 5", dump_dir=tmp_path)
    assert error.report.fault.kind == "inf" and error.dump == tmp_path / "nonfinite-call-1.npz"
    assert f"inputs written to {error.dump}: sonicmoe bisect {error.dump}" in str(error)
    report = bisect(load_dump(error.dump), "reference")
    assert str(report.fault) == str(error.report.fault)
    before = error.dump.read_bytes()
    again = found(step, dump_dir=tmp_path)
    assert again.dump == tmp_path / "nonfinite-call-1-2.npz", "the first one stays"
    assert error.dump.read_bytes() == before


@pytest.mark.parametrize(("mode", "bad"), [("perf", np.nan), ("off", np.inf)])
def test_a_bad_weight_of_an_expert_without_tokens_is_named(mode, bad):
    problem = PROBLEM.but(down=spoiled(PROBLEM.down, bad, 2, 7, 3))
    text = str(found(make_layer(mode, problem).run, "first bad: input w2 = "))
    assert (
        "experts[2].down_proj.weight at expert 2, row 3, column 7" in text
        and "older than the weights" not in text
    )


@pytest.fixture
def engine(monkeypatch):
    """Has every node choose this engine."""

    def choose(it):
        choice = EngineChoice(it, "test")
        monkeypatch.setattr("sonicmoe.layer.plan.ready_engine", lambda *_: choice)

    return choose


class SpoiledEngine(ReferenceEngine):
    """The reference engine with NaN in one weight gradient; what a bisection runs again is sound."""

    def backward_dw(self, pending, targets):
        super().backward_dw(pending, targets)
        sums = targets.sums("dw1")
        sums[2, 3, 4] = float("nan")
        targets.replace("dw1", sums)


@pytest.mark.parametrize("flush", ["auto", "step", "backward"])
def test_a_bad_weight_gradient_is_found_wherever_it_went(flush, engine):
    engine(SpoiledEngine())
    assert found(make_layer(flush=flush).step, "did not repeat").report.healthy


def test_a_path_that_cannot_be_written_is_refused_before_the_step(tmp_path):
    layer, taken = make_layer(), tmp_path / "file"
    taken.touch()
    for path in (taken / "step.npz", tmp_path):
        with pytest.raises(DumpError, match="cannot write a step to"):
            layer.node.dump(path)
    assert observe._observers == ()
    layer.node.dump(tmp_path / "made" / "step.npz")
    layer.run()
    assert load_dump(tmp_path / "made" / "step.npz").dout is not None


def test_a_write_that_fails_during_the_step_does_not_break_it(tmp_path, monkeypatch, caplog):
    def save_dump(path, step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(capture, "save_dump", save_dump)
    layer = make_layer()
    layer.node.dump(tmp_path / "step.npz")
    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        call = layer.run()
        layer.run()
    assert call.dx is not None and observe._observers == ()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "sonicmoe"]
    assert "step.npz" in line and "No space left on device" in line


def test_a_block_without_a_node_call_says_that_it_checked_nothing(caplog):
    def warnings():
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if "detect_nonfinite" in line]

    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        layer = make_layer()
        with detect_nonfinite():
            call = layer.call()
        with detect_nonfinite():
            call.backward()
        with pytest.raises(ZeroDivisionError), detect_nonfinite():
            _ = 1 // 0
        assert warnings() == []
        with detect_nonfinite():
            pass
    (line,) = warnings()
    assert "SonicMoEMlpNode, MoE, the functional API" in line
