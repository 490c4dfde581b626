"""What Paddle's own suites need beside `node.node_harness`: the layer in plain Paddle operations.

Importing this module skips the importing test module where the Paddle suites cannot run.
"""

from __future__ import annotations

import pytest
from paddle_face import SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

import paddle
from engine.moe_golden import golden
from framework import numpy, relative_rmse
from node.node_harness import summed
from paddle.nn import functional as F


def plain_moe(x, indices, probs, ups, downs):
    """Every expert on every token, weighted by the probability of the slot that chose it (0 where
    none did).
    """
    out = paddle.zeros_like(x)
    for expert, (up_gate, down) in enumerate(zip(ups, downs, strict=True)):
        gate, up = paddle.chunk(paddle.matmul(x, up_gate), 2, axis=-1)
        y = paddle.matmul(F.silu(gate) * up, down)
        weight = (paddle.where(indices == expert, probs, paddle.zeros_like(probs))).sum(
            -1, keepdim=True
        )
        out = out + weight * y
    return out


def weight_gradients(problems):
    """Those of these micro-batches, one array per weight in the order of the node's parameters."""
    dw1, dw2 = summed(map(golden, problems))
    return [*dw1, *dw2]


def assert_weight_gradients(gradients, wanted):
    """Every weight on its own: an expert may not hide in another's norm."""
    for position, (gradient, expected) in enumerate(zip(gradients, wanted, strict=True)):
        got = numpy(gradient) if isinstance(gradient, paddle.Tensor) else gradient
        assert tuple(got.shape) == tuple(expected.shape), position
        assert relative_rmse(got, expected) < 1e-5, position
