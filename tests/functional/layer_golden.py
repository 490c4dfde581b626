"""How tests build and run a whole MoE layer, and what it gives in fp64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from framework import numpy, relative_rmse, torch

from sonicmoe import MoE
from sonicmoe.enums import ActivationType

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


def golden_layer(moe, x, dout):
    """`run_layer` of the plain backend in fp64, which the oracle compares with its golden."""
    exact = copy.deepcopy(moe).double()
    return run_layer(exact, x.double(), dout.double(), kernel_backend_moe="torch")


def run_layer(moe, x, dout, **options):
    """`(out, aux, gradients by name)` of `(out * dout).sum() + AUX_WEIGHT * aux`; leaves no gradient
    behind.
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


def assert_close(actual, expected, bound, floor=0.0):
    """Relative RMSE of every tensor of two runs is in `[floor, bound]`."""
    actual, expected = flat(actual), flat(expected)
    assert set(actual) == set(expected)
    for name, value in actual.items():
        got, want = numpy(value), numpy(expected[name])
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
        np.testing.assert_array_equal(numpy(got), numpy(expected[name]), err_msg=name)
