"""The node inside graphs of Paddle, against Paddle's own autograd. tests/node has the numbers of
the node alone, under Paddle too.
"""

from __future__ import annotations

import numpy as np
import pytest
from ernie import (
    PRECISE_BOUND,
    Pending,
    assert_close,
    assert_weight_gradients,
    bind_main_grads,
    golden,
    make_batch,
    make_experts,
    make_node,
    paddle,
    plain_moe,
    weights_of,
)
from framework import numpy, tensor

from sonicmoe import layouts, weight_source
from sonicmoe.engine import reference
from sonicmoe.routing import build as routing


@pytest.mark.parametrize("consumer", ["transpose", "expand", "slice", "sum of a part"])
def test_shapes_of_the_incoming_gradient(consumer):
    """dout may arrive strided, broadcast or with rows no one used."""
    weight = tensor(np.random.default_rng(9).standard_normal((32, 40)).astype("float32"))
    consume = {
        "transpose": lambda out: (out.transpose([1, 0]) * weight).sum(),
        "expand": lambda out: out.sum(-1).square().sum(),
        "slice": lambda out: out[::2, 1::3].square().sum(),
        "sum of a part": lambda out: out[3:9].sum(),
    }[consumer]
    experts, batch = make_experts(), make_batch()
    node, main_grads = make_node(experts), bind_main_grads(experts)
    pending = Pending(node, batch)
    consume(pending.out).backward()
    node.step()
    x, probs = tensor(batch.x, grad=True), tensor(batch.probs, grad=True)
    copies = [tensor(numpy(w).astype("float32"), grad=True) for w in weights_of(experts)]
    consume(plain_moe(x, tensor(batch.indices), probs, copies[:3], copies[3:])).backward()
    assert_close(pending.result().dx, numpy(x.grad), PRECISE_BOUND, "dx")
    assert_close(pending.result().dprobs, numpy(probs.grad), PRECISE_BOUND, "dprobs")
    assert_weight_gradients(main_grads, [numpy(w.grad) for w in copies], PRECISE_BOUND)


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
    experts, batch = make_experts(), make_batch()
    node, main_grads = make_node(experts), bind_main_grads(experts)
    monkeypatch.setattr(tracer, "_amp_dtype", "bfloat16")
    monkeypatch.setattr(tracer, "_amp_level", level.O2)
    with paddle.set_grad_enabled(grad):
        pending = Pending(node, batch)
    if grad:
        pending.backward()
    node.step()
    assert tracer._amp_level == level.O2, "the caller's setting is back"
    ran = {"grouped", "exact_routing", "stack"} | ({"deinterleave_gate_up"} if grad else set())
    assert amp_levels == {name: {level.O0} for name in ran}
    assert pending.out.dtype == paddle.float32
    wanted = golden(make_experts(), [batch])
    assert_close(numpy(pending.out), wanted.results[0].out, PRECISE_BOUND)
    if grad:
        assert_weight_gradients(main_grads, wanted.dw, PRECISE_BOUND)
