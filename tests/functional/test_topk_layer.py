"""`moe_TC_softmax_topk_layer`, `count_cumsum` and `enable_quack_gemm`."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, relative_rmse, torch
from functional.layer_golden import (
    batch,
    golden_layer,
    make_layer,
    make_tokens,
    run_layer,
    views,
)

import sonicmoe
from sonicmoe import (
    SonicMoEConfig,
    count_cumsum,
    enable_quack_gemm,
    moe_TC_softmax_topk_layer,
)
from sonicmoe.config import current_config


def arguments(moe, x):
    names = "x", "router_w", "w1", "b1", "w2", "b2", "K"
    return dict(zip(names, (x, moe.router.weight, *views(moe), moe.top_k), strict=True))


def test_what_it_returns():
    moe, x, dout = make_layer(bias=True, idle=3), *batch()
    out, logits, frequency = moe_TC_softmax_topk_layer(
        *arguments(moe, x).values(), 0, "swiglu", False
    )
    exact = numpy(x) @ numpy(moe.router.weight).T
    chosen = np.argsort(-exact, -1)[:, :2]
    assert relative_rmse(numpy(out), golden_layer(moe, x, dout)[0]) < 2e-6
    assert logits.shape == (19, 5) and relative_rmse(numpy(logits), exact) < 1e-6
    assert frequency.dtype == torch.int32 and not frequency.requires_grad
    assert (
        frequency.tolist() == np.bincount(chosen.ravel(), minlength=5).tolist()
        and frequency[3] == 0
    )
    assert torch.equal(out, run_layer(moe, x, dout)[0]), "MoE is this function"


@pytest.mark.parametrize("normalised", [False, True])
def test_softmax_over_all_experts(normalised):
    """Arguments 11 and 12, by position as upstream has them."""
    moe, x, dout = make_layer(), *batch()
    given = (*arguments(moe, x).values(), 0, "swiglu", False)
    out, logits, _ = moe_TC_softmax_topk_layer(*given, False, normalised)
    over_topk = moe_TC_softmax_topk_layer(*given)[0]
    chosen, others = logits.topk(2, -1).values, torch.logsumexp(logits, -1, keepdim=True)
    share = torch.exp(chosen - others).sum(-1, keepdim=True)
    wanted = over_topk if normalised else over_topk * share
    assert relative_rmse(numpy(out), numpy(wanted)) < 2e-6
    assert float(share.detach().min()) < 0.99, "the two softmaxes differ"
    ours, theirs = (
        torch.autograd.grad((y * dout).sum(), moe.router.weight, retain_graph=True)[0]
        for y in (out, wanted)
    )
    assert relative_rmse(numpy(ours), numpy(theirs)) < 1e-5


def test_halves_are_argument_13():
    moe, x = make_layer(), make_tokens(19, 32)
    by_name = moe_TC_softmax_topk_layer(**arguments(moe, x), concat_layout=True)[0]
    given = (*arguments(moe, x).values(), 0, "swiglu", False, True, False, True)
    assert torch.equal(moe_TC_softmax_topk_layer(*given)[0], by_name)
    with pytest.raises(TypeError, match="positional arguments"):
        moe_TC_softmax_topk_layer(*given, True)


# count_cumsum


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_counts_and_prefix_sum(dtype):
    x = torch.tensor([3, 0, -1, 3, 4, 99, 1, 3, -7, 2**31 - 1], dtype=dtype)
    counts, running = count_cumsum(x, 4)
    assert counts.tolist() == [1, 1, 0, 3] and running.tolist() == [1, 2, 2, 5]
    assert counts.dtype == running.dtype == torch.int32
    assert torch.equal(count_cumsum(x, 4, do_cumsum=False), counts)
    assert count_cumsum(x[::2], 4)[0].tolist() == [0, 1, 0, 1]
    for nobody in (x[:0], x[2:3]):
        counts, running = count_cumsum(nobody, 4)
        assert counts.tolist() == running.tolist() == [0, 0, 0, 0]


# enable_quack_gemm


def test_quack_switch_is_accepted_and_changes_nothing_else():
    moe, x = make_layer(), make_tokens(5, 32)
    expected = moe(x, use_fp8=True)[0]
    for switch in (enable_quack_gemm(), enable_quack_gemm(True), enable_quack_gemm(False)):
        with SonicMoEConfig(fp8_mode="mem").activate(), switch:
            assert current_config().fp8_mode == "mem", "the configuration in force was dropped"
            assert torch.equal(moe(x)[0], expected)
    with enable_quack_gemm(True):
        assert current_config().use_quack_gemm
        with enable_quack_gemm(False):
            assert not current_config().use_quack_gemm
    assert not current_config().use_quack_gemm


def test_package_exports():
    for name in sonicmoe.__all__:
        assert getattr(sonicmoe, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'MoEE'"):
        sonicmoe.MoEE  # noqa: B018
