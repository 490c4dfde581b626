"""What the framework has switched on around a call does not reach into it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from ernie import paddle

from sonicmoe import interop


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
