"""`node.dump`: the file holds what the next step was given, and only that step's."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy
from node.node_harness import FP8, FULL, Layer, problems

from sonicmoe.diagnostics.call_hooks import _observers
from sonicmoe.diagnostics.step_dump import load_dump


def assert_inputs(step, call, layer):
    problem = call.problem
    valid = (problem.indices >= 0) & (problem.indices < problem.num_experts)
    w1, w2 = (numpy(matrix) for matrix in layer.node._experts.source.native())
    for found, given in (
        (step.x, numpy(call.x)),
        (step.indices, problem.indices),
        (step.w1, w1),
        (step.w2, w2),
    ):
        np.testing.assert_array_equal(found, given)
    np.testing.assert_array_equal(step.probs[valid], numpy(call.probs)[valid])


@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("config", [FULL, FP8], ids=["full", "fp8"])
def test_holds_forward_then_backward_of_the_next_step(tmp_path, fused, config):
    layer = Layer(fused=fused, config=config)
    path = tmp_path / "step.npz"
    layer.node.dump(path)
    call = layer.call()
    step = load_dump(path)
    assert_inputs(step, call, layer)
    assert step.dout is None
    assert (
        step.settings.recipe == ("iso128" if config is FP8 else None)
        and step.settings.dtype == "float32"
    )
    call.backward()
    step = load_dump(path)
    assert_inputs(step, call, layer)
    np.testing.assert_array_equal(step.dout, numpy(call.dout))


def test_takes_one_step_of_this_node_alone(tmp_path):
    layer, other = Layer(), Layer(problems(2)[1])
    path = tmp_path / "step.npz"
    layer.node.dump(str(path))
    other.run()
    assert not path.exists()
    first = layer.run()
    assert not _observers
    layer.run(problems(2)[1])
    assert_inputs(load_dump(path), first, layer)
