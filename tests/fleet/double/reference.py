"""Experts in plain Paddle: a loop over experts in fp32, gradients by Paddle's autograd."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F


def swiglu(clamp=0.0):
    """`silu(g) u`; clamped: `min(g, c)` and `clamp(u, -c, c)`."""

    def apply(gate, up):
        if clamp:
            gate, up = paddle.clip(gate, max=clamp), paddle.clip(up, -clamp, clamp)
        return F.silu(gate) * up

    return apply


def situ(beta, linear_beta):
    """`beta tanh(g / beta) sigmoid(g)` times `lb tanh(u / lb)`, or times u."""

    def apply(gate, up):
        if linear_beta is not None:
            up = linear_beta * paddle.tanh(up / linear_beta)
        return beta * paddle.tanh(gate / beta) * F.sigmoid(gate) * up

    return apply


def run_experts(x, indices, probs, w1, w2, activation):
    """fp32 `[N, H]` of x `[N, H]`, probs `[N, K]`, and weights `[E, H, 2I]` and `[E, I, H]`, all
    fp32; indices any integers, an id outside `[0, E)` is nobody.
    """
    ids = indices.numpy()
    out = paddle.zeros_like(x)
    for expert in range(len(w1)):
        rows, slots = np.nonzero(ids == expert)
        if not len(rows):
            continue
        rows, slots = paddle.to_tensor(rows), paddle.to_tensor(slots)
        gate, up = paddle.chunk(x.index_select(rows) @ w1[expert], 2, axis=-1)
        y = activation(gate, up) @ w2[expert]
        weight = paddle.gather_nd(probs, paddle.stack([rows, slots], -1)).unsqueeze(-1)
        out = paddle.scatter_nd_add(out, rows.unsqueeze(-1), y * weight)
    return out
