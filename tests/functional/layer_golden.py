"""A whole MoE layer in fp64: router, experts (`oracle.golden`), load-balancing loss, and every
gradient; and how tests build and run one.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import Problem, golden, native_order
from framework import numpy, relative_rmse, torch

from sonicmoe import MoE
from sonicmoe.enums import ActivationType, is_glu

AUX_WEIGHT = 0.3
FP8 = {"use_fp8": True}
MODES = pytest.mark.parametrize("options", [{}, FP8], ids=["fp32", "fp8"])


def make_layer(
    activation=ActivationType.SWIGLU,
    *,
    experts=5,
    topk=2,
    hidden=32,
    intermediate=24,
    bias=False,
    idle=None,
    seed=0,
):
    """fp32 layer with weights of unit gain; expert `idle` is never chosen by tokens of
    `make_tokens`.
    """
    torch.manual_seed(seed)
    moe = MoE(experts, topk, hidden, intermediate, activation, bias, std=1.0)
    with torch.no_grad():
        moe.router.weight.normal_()
        moe.c_fc.weight.mul_(hidden**-0.5)
        moe.c_proj.weight.mul_(intermediate**-0.5)
        for part in (moe.c_fc, moe.c_proj):
            if part.bias is not None:
                part.bias.normal_(0.0, 0.3)
        if idle is not None:
            moe.router.weight[idle].zero_()
            moe.router.weight[idle, 0] = -100.0
    return moe


def make_tokens(*shape, seed=1, dtype=None):
    """Normal tokens; their first feature is positive."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 0] = x[..., 0].abs() + 0.5
    return x.to(dtype or torch.float32)


def batch(count=19, seed=1, dtype=None):
    """Tokens and the gradient of the output."""
    return (make_tokens(count, 32, seed=s, dtype=dtype) for s in (seed, seed + 100))


def views(moe):
    """The layer's weights as upstream takes them: `w1 [N1, H, E]`, `b1`, `w2 [H, I, E]`, `b2`."""
    up, down = moe.c_fc, moe.c_proj
    return up.weight.permute(1, 2, 0), up.bias, down.weight.permute(1, 2, 0), down.bias


def native(weight):
    """fp64 copy of a parameter."""
    return None if weight is None else numpy(weight)


def softmax(values):
    shifted = np.exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def softmax_backward(probs, gradient):
    return probs * (gradient - (probs * gradient).sum(-1, keepdims=True))


def problem_of(w1, w2, b1, b2, activation, x, indices, probs, dout):
    """A golden's problem from native fp64 `w1 [E, N1, H]`, `w2 [E, H, I]`."""
    order = native_order(w1.shape[1], is_glu(activation))
    up_gate = np.zeros((w1.shape[0], w1.shape[2], w1.shape[1]))
    up_gate[:, :, order] = w1.transpose(0, 2, 1)
    bias = None
    if b1 is not None:
        bias = np.zeros_like(b1)
        bias[:, order] = b1
    return Problem(activation, x, indices, probs, dout, up_gate, w2.transpose(0, 2, 1), bias, b2)


def native_gradients(problem, result):
    """Weight gradients of a golden's result in native layout: dw1, dw2, db1, db2."""
    order = native_order(problem.up_gate.shape[2], problem.gated)
    dw1, db1 = (
        result.dw1.transpose(0, 2, 1)[:, order],
        None if result.db1 is None else result.db1[:, order],
    )
    return dw1, result.dw2.transpose(0, 2, 1), db1, result.db2


def golden_layer(moe, x, dout):
    """`out`, `aux`, and the gradients of `(out * dout).sum() + AUX_WEIGHT * aux` by name, in fp64."""
    x, dout, router = numpy(x), numpy(dout), native(moe.router.weight)
    tokens, experts = x.shape[0], moe.num_experts
    logits = x @ router.T
    indices = np.argsort(-logits, axis=-1, kind="stable")[:, : moe.top_k]
    probs = softmax(np.take_along_axis(logits, indices, -1))
    weights = [
        native(weight)
        for weight in (moe.c_fc.weight, moe.c_proj.weight, moe.c_fc.bias, moe.c_proj.bias)
    ]
    problem = problem_of(*weights, moe.activation_function, x, indices, probs, dout)
    result = golden(problem)

    dlogits = np.zeros_like(logits)
    np.put_along_axis(dlogits, indices, softmax_backward(probs, result.dprobs), -1)
    share = np.bincount(indices.ravel(), minlength=experts) / indices.size
    everywhere = softmax(logits)
    aux = experts * (everywhere.mean(0) * share).sum()
    dlogits += AUX_WEIGHT * softmax_backward(
        everywhere, np.tile(experts * share / tokens, (tokens, 1))
    )

    dw1, dw2, db1, db2 = native_gradients(problem, result)
    gradients = {"x": result.dx + dlogits @ router, "router.weight": dlogits.T @ x}
    gradients |= {"c_fc.weight": dw1, "c_fc.bias": db1, "c_proj.weight": dw2, "c_proj.bias": db2}
    return result.out, aux, {name: value for name, value in gradients.items() if value is not None}


def run_layer(moe, x, dout, **options):
    """`(out, aux, gradients by name)` of a layer, as `golden_layer` returns them but as tensors;
    leaves no gradient behind.
    """
    x = x.detach().clone().requires_grad_()
    out, aux = moe(x, **options)
    named = {"x": x, **dict(moe.named_parameters())}
    loss = (out.float() * dout.float()).sum() + AUX_WEIGHT * aux
    return (
        out.detach(),
        aux.detach(),
        dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)),
    )


def flat(run):
    """A run or a golden as one dictionary."""
    out, aux, gradients = run
    return {"out": out, "aux": aux, **gradients}


def array(value):
    return numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value, np.float64)


def assert_close(actual, expected, bound, floor=0.0):
    """Relative RMSE of every tensor of two runs is in `[floor, bound]`."""
    actual, expected = flat(actual), flat(expected)
    assert set(actual) == set(expected)
    for name, value in actual.items():
        got, want = array(value), array(expected[name])
        assert got.shape == want.shape, name
        assert np.isfinite(got).all(), name
        error = relative_rmse(got, want)
        assert error <= bound, f"{name}: relative RMSE {error:.3g} > {bound:.3g}"
        assert error >= floor or name == "aux", f"{name}: relative RMSE {error:.3g} < {floor:.3g}"


def assert_same_bits(actual, expected):
    actual, expected = flat(actual), flat(expected)
    assert set(actual) == set(expected)
    for name, got in actual.items():
        assert got.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(array(got), array(expected[name]), err_msg=name)
