"""The node inside graphs of Paddle, against Paddle's own autograd. tests/node has the numbers of
the node alone, under Paddle too.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from engine.moe_golden import golden
from framework import numpy, relative_rmse, tensor, torch
from node.node_harness import Layer, assert_close

from sonicmoe import interop, layouts, weight_source
from sonicmoe.engine import reference
from sonicmoe.routing import build as routing


@pytest.mark.parametrize("consumer", ["transpose", "expand", "slice", "sum of a part"])
def test_shapes_of_the_incoming_gradient(consumer):
    """dout may arrive strided, broadcast or with rows no one used."""
    layer = Layer(flush="step", main_grad=0.0)
    problem = layer.problem
    weight = tensor(np.random.default_rng(9).standard_normal(problem.x.T.shape), torch.float32)
    consume = {
        "transpose": lambda out: (out.transpose([1, 0]) * weight).sum(),
        "expand": lambda out: out.sum(-1).square().sum(),
        "slice": lambda out: out[::2, 1::3].square().sum(),
        "sum of a part": lambda out: out[3:9].sum(),
    }[consumer]
    call = layer.call()
    consume(call.out).backward()
    layer.node.step()
    out = tensor(golden(problem).out, torch.float32, grad=True)
    consume(out).backward()
    wanted = golden(problem.but(dout=numpy(out.grad)))
    assert_close(layer.result(call), wanted)


@pytest.fixture
def amp_levels(monkeypatch):
    """The tracer's mixed-precision level at every step of the package that computes, by step."""
    levels, tracer = {}, paddle.base.framework._dygraph_tracer()

    def spy(module, name):
        original = getattr(module, name)

        def called(*args, **kwargs):
            levels.setdefault(name, set()).add(tracer._amp_level)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    spy(reference, "grouped")
    spy(routing, "exact_routing")
    spy(weight_source, "stack")
    spy(layouts, "deinterleave_gate_up")
    return levels


@pytest.mark.parametrize("grad", [True, False])
def test_automatic_mixed_precision_stays_outside(grad, amp_levels, monkeypatch):
    """Autocast around the layer must not reach routing, engine, caches or flush. On CPU it only
    warns, so the tracer is told itself.
    """
    tracer, level = paddle.base.framework._dygraph_tracer(), paddle.base.core.AmpLevel
    layer = Layer(flush="step", main_grad=0.0)
    monkeypatch.setattr(tracer, "_amp_dtype", "bfloat16")
    monkeypatch.setattr(tracer, "_amp_level", level.O2)
    with paddle.set_grad_enabled(grad):
        call = layer.call()
    if grad:
        call.backward()
    layer.node.step()
    assert tracer._amp_level == level.O2, "the caller's setting is back"
    ran = {"grouped", "exact_routing", "stack"} | ({"deinterleave_gate_up"} if grad else set())
    assert amp_levels == {name: {level.O0} for name in ran}
    assert call.out.dtype == paddle.float32
    assert relative_rmse(numpy(call.out), golden(layer.problem).out) < 1e-5
    assert not grad or layer.error() < 1e-5


@pytest.mark.parametrize("gradients", [True, False])
def test_plain_ops(gradients):
    """No autograd inside, nested or not; what was on before is on again."""
    weight = paddle.ones([8, 8])
    weight.stop_gradient = False
    with paddle.set_grad_enabled(gradients):
        with interop.plain_ops(), interop.plain_ops():
            assert not interop.grad_enabled() and (weight * 2).stop_gradient
        assert interop.grad_enabled() is gradients
        assert (weight * 2).stop_gradient is not gradients
