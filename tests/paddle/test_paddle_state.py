"""What the framework has switched on around a call does not reach into it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from ernie import make_batch, make_experts, make_node, paddle
from framework import tensor

from sonicmoe import interop
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.interop import torch
from sonicmoe.node import mlp_call


@contextmanager
def mixed_precision():
    """The state that `paddle.amp.auto_cast` makes on a GPU; on a host it refuses to, and no
    operator there looks at it.
    """
    tracer = paddle.base.framework._dygraph_tracer()
    before = tracer._amp_level, tracer._amp_dtype
    tracer._amp_level, tracer._amp_dtype = paddle.base.core.AmpLevel.O1, "bfloat16"
    try:
        yield
    finally:
        tracer._amp_level, tracer._amp_dtype = before


@pytest.mark.parametrize("gradients", [True, False])
def test_plain_ops(gradients):
    """No autocast and no autograd inside, nested or not; what was on before is on again."""
    weight = paddle.ones([8, 8])
    weight.stop_gradient = False
    with paddle.set_grad_enabled(gradients), mixed_precision():
        with interop.plain_ops(), interop.plain_ops():
            assert not paddle.is_autocast_enabled() and not interop.grad_enabled()
            assert (weight * 2).stop_gradient
        assert paddle.is_autocast_enabled() and interop.grad_enabled() is gradients
    with paddle.set_grad_enabled(gradients):
        with interop.plain_ops():
            assert (weight * 2).stop_gradient
        assert (weight * 2).stop_gradient is not gradients


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_under_mixed_precision_runs_without(monkeypatch, grad):
    """From the routing on; afterwards the caller has it back."""
    batch, node, seen = make_batch(), make_node(make_experts()), []

    def noted(function):
        def call(*args, **kwargs):
            seen.append(paddle.is_autocast_enabled())
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(mlp_call, "route", noted(mlp_call.route))
    monkeypatch.setattr(ReferenceEngine, "forward", noted(ReferenceEngine.forward))
    with mixed_precision():
        node(
            tensor(batch.x, grad=grad),
            batch.counts,
            tensor(batch.indices),
            tensor(batch.probs, grad=grad),
        )
        assert paddle.is_autocast_enabled()
    assert seen == [False, False]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(3, 5), (0,), (2, 0), (1,)])
def test_empty(shape, dtype):
    like = paddle.ones([1])
    made = interop.empty(shape, dtype, interop.device_of(like))
    assert tuple(made.shape) == shape and made.dtype == dtype and made.stop_gradient
    assert interop.device_name(made) == interop.device_name(like)
