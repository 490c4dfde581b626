"""`node.dump`: the file holds what the next step was given, and only that step's."""

from __future__ import annotations

import atexit

import numpy as np
import pytest
from engine.moe_golden import make_problem
from framework import numpy
from node.node_harness import ARRANGEMENTS, CONFIGS, FP8, Layer, recomputed

from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.step_dump import load_dump
from sonicmoe.enums import ActivationType

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.npz"


def assert_inputs(step, call, layer):
    problem = call.problem
    valid = (problem.indices >= 0) & (problem.indices < problem.num_experts)
    w1, w2 = (numpy(matrix) for matrix in layer.node._state.parameters.native())
    for found, given in (
        (step.x, numpy(call.x)),
        (step.indices, problem.indices),
        (step.w1, w1),
        (step.w2, w2),
    ):
        np.testing.assert_array_equal(found, given)
    np.testing.assert_array_equal(step.probs[valid], numpy(call.probs)[valid])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@each_config
def test_holds_the_next_backward_and_its_forward(path, arrangement, config):
    layer = Layer(arrangement=arrangement, config=config)
    layer.node.dump(path)
    call = layer.call()
    assert not path.exists()
    call.backward()
    step = load_dump(path)
    assert_inputs(step, call, layer)
    np.testing.assert_array_equal(step.dout, numpy(call.dout))
    assert step.settings.dtype == "float32"
    assert step.settings.recipe == ("dx256" if config is FP8 else None)
    report = bisect(step, "reference")
    assert report.healthy and report.missing == ()


def test_what_was_in_the_memory_of_rows_that_nobody_reads_is_no_fault(path):
    """As a dispatcher delivers them that does not wait for counts."""
    problem = make_problem()
    x, indices = problem.x.copy(), problem.indices.copy()
    indices[3:6], x[4:6] = -1, np.nan
    layer = Layer(problem.but(x=x, indices=indices))
    layer.node.dump(path)
    layer.run(counts="none")
    step = load_dump(path)
    assert not step.x[4:6].any()
    rest = np.r_[:4, 6 : len(x)]
    np.testing.assert_array_equal(step.x[rest], x.astype(np.float32)[rest])
    assert bisect(step, "reference").healthy


def test_a_layer_with_parameters_of_its_own_is_judged_by_them(path):
    """The node computes with them, the dump keeps them, and bisect's golden uses them."""
    problem = make_problem(ActivationType.SWIGLU_OAI)
    layer = Layer(problem, activation_parameters={"limit": 0.25, "alpha": 1.702})
    layer.node.dump(path)
    own = layer.run()
    step = load_dump(path)
    assert step.settings.activation_parameters == {"limit": 0.25}
    assert bisect(step, "reference").healthy
    usual = Layer(problem).run()
    assert np.abs(numpy(own.out) - numpy(usual.out)).max() > 1e-3


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
@each_config
def test_the_step_of_a_recomputed_block(path, reentrant, config):
    """The layer is behind other operations: the first pass of the re-entrant kind, which keeps no graph,
    does not see that x and probs want gradients.
    """
    layer = Layer(config=config)
    call = layer.call()

    def block(x, probs):
        return layer.node(x * 1, None, call.indices, probs * 1)

    layer.node.dump(path)
    recomputed(block, call.x, call.probs, use_reentrant=reentrant).backward(call.dout)
    step = load_dump(path)
    assert_inputs(step, call, layer)
    np.testing.assert_array_equal(step.dout, numpy(call.dout))


def test_a_dump_that_comes_too_late_says_so_at_the_end(path, monkeypatch, caplog):
    at_end = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    monkeypatch.setattr(atexit, "unregister", at_end.remove)
    layer = Layer()
    layer.run()
    layer.node.dump(path)
    with caplog.at_level("WARNING", "sonicmoe"):
        (say,) = at_end
        say()
    assert f"nothing was written to {path}" in caplog.text and "ask before the step" in caplog.text
    layer.run()
    assert path.exists() and not at_end
