"""Autograd that is on around a call does not reach into it. test_paddle_gradients.py has autocast."""

from __future__ import annotations

import pytest
from ernie import paddle

from sonicmoe import interop


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
