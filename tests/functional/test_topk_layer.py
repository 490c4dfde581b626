"""`moe_TC_softmax_topk_layer`, `count_cumsum` and `enable_quack_gemm`."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, relative_rmse, torch
from functional.layer_golden import golden_layer, make_layer, make_tokens, run_layer

import sonicmoe
from sonicmoe import (
    MoE,
    SonicMoEConfig,
    count_cumsum,
    enable_quack_gemm,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)
from sonicmoe.config import current_config
from sonicmoe.errors import ConfigError, DTypeError, ShapeError


def arguments(moe, x):
    return {
        "x": x,
        "router_w": moe.router.weight,
        "w1": moe.c_fc.weight.permute(1, 2, 0),
        "b1": moe.c_fc.bias,
        "w2": moe.c_proj.weight.permute(1, 2, 0),
        "b2": moe.c_proj.bias,
        "K": moe.top_k,
    }


def test_what_it_returns():
    moe, x, dout = make_layer(bias=True, idle=3), make_tokens(19, 32), make_tokens(19, 32, seed=2)
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


def test_logits_pass_gradients_on():
    moe, x = make_layer(), make_tokens(19, 32).requires_grad_()
    _, logits, _ = moe_TC_softmax_topk_layer(**arguments(moe, x))
    logits.square().sum().backward()
    expected = 2 * numpy(logits).T @ numpy(x)
    assert relative_rmse(numpy(moe.router.weight.grad), expected) < 1e-6
    assert moe.c_fc.weight.grad is None or not moe.c_fc.weight.grad.any()


@pytest.mark.parametrize("use_fp8", [False, True], ids=["fp32", "fp8"])
def test_split_half_weights(use_fp8):
    moe, x = make_layer(bias=True), make_tokens(19, 32)
    order = [*range(0, 48, 2), *range(1, 48, 2)]
    split = arguments(moe, x) | {
        "w1": moe.c_fc.weight[:, order].permute(1, 2, 0),
        "b1": moe.c_fc.bias[:, order],
    }
    with SonicMoEConfig(fp8_mode="perf" if use_fp8 else "off").activate():
        out = moe_TC_softmax_topk_layer(**arguments(moe, x))[0]
        same = moe_TC_softmax_topk_layer(**split, concat_layout=True)[0]
    assert torch.equal(out, same)
    gradients = [torch.autograd.grad(y.square().sum(), list(moe.parameters())) for y in (out, same)]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("normalised", [False, True])
def test_softmax_over_all_experts(normalised):
    """Arguments 11 and 12, by position as upstream has them."""
    moe, x, dout = make_layer(), make_tokens(19, 32), make_tokens(19, 32, seed=2)
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


@pytest.mark.parametrize("general", [False, True], ids=["token choice", "any routing"])
def test_the_activation_has_parameters(general):
    """Of the functions, as of `MoE`."""
    own = {"beta": 4.0, "linear_beta": 0.5}
    moe = MoE(5, 2, 32, 24, "situ_glu", std=0.5, activation_parameters=own)
    x, given = make_tokens(19, 32), {"activation_type": "situ_glu", "activation_parameters": own}
    if general:
        chosen, ids = moe.router(x).topk(2, -1)
        rows = torch.arange(19).repeat_interleave(2)
        _, w1, b1, w2, b2, _ = list(arguments(moe, x).values())[1:]
        triples = torch.softmax(chosen, -1).flatten(), rows, ids.flatten()
        out, _ = moe_general_routing_inputs(x, *triples, w1, b1, w2, b2, **given)
    else:
        out, _, _ = moe_TC_softmax_topk_layer(**arguments(moe, x), **given)
    torch.testing.assert_close(out, moe(x)[0])
    with pytest.raises(ConfigError, match="needed: a number from"):
        given["activation_parameters"] = {"beta": 0.0}
        moe_TC_softmax_topk_layer(**arguments(moe, x), **given)


def test_inference(saves):
    moe, x = make_layer(), make_tokens(19, 32)
    out, _, _ = moe_TC_softmax_topk_layer(**arguments(moe, x))
    quiet, _, _ = moe_TC_softmax_topk_layer(**arguments(moe, x), is_inference_mode_enabled=True)
    assert saves == [True, False] and torch.equal(out, quiet) and not quiet.requires_grad


REFUSED = {
    "K above E": ({"K": 6}, "K is 6; needed: 1 to 5"),
    "K of nothing": ({"K": 0}, "K is 0; needed: 1 to 5"),
    "K in words": ({"K": "2"}, "K is '2'; needed: 1 to 5"),
    "half an expert": ({"K": 2.0}, "K is 2.0; needed: 1 to 5"),
    "K as a flag": ({"K": True}, "K is True; needed: 1 to 5"),
    "router of other tokens": (
        {"router_w": torch.zeros(5, 31)},
        r"router_w has shape \(5, 31\); needed: \[E, H\] with H = 32",
    ),
    "router of one expert": ({"router_w": torch.zeros(32)}, r"router_w has shape \(32,\)"),
    "router of more experts": (
        {"router_w": torch.zeros(6, 32)},
        r"w1 .*needed: 6 experts \(the rows of router_w\)",
    ),
    "w2 of more experts": ({"w2": torch.zeros(32, 24, 6)}, "w2 .*needed: 5 experts"),
    "one bias": ({"b2": torch.zeros(5, 32)}, "both or neither"),
    "bias of another width": ({"b1": torch.zeros(5, 24), "b2": torch.zeros(5, 32)}, "b1 has shape"),
    "tokens with three axes": (
        {"x": torch.zeros(2, 4, 32)},
        r"x has shape \(2, 4, 32\); needed: \[T, H\]",
    ),
    "one token": ({"x": torch.zeros(32)}, r"x has shape \(32,\); needed: \[T, H\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(ShapeError, match=message):
        moe_TC_softmax_topk_layer(**arguments(make_layer(), make_tokens(4, 32)) | changes)


@pytest.mark.parametrize(
    "value", [None, [1.0], np.zeros((5, 32), np.float32)], ids=["none", "list", "numpy"]
)
@pytest.mark.parametrize("name", ["x", "router_w", "w1", "w2"])
def test_what_is_no_tensor_is_named(name, value):
    given = arguments(make_layer(), make_tokens(4, 32)) | {name: value}
    with pytest.raises(
        TypeError, match=f"^{name} must be a torch tensor, got {type(value).__name__}$"
    ):
        moe_TC_softmax_topk_layer(**given)


def test_counts_of_what_is_no_tensor_or_of_no_number_of_experts():
    with pytest.raises(TypeError, match=r"^x must be a torch tensor, got list$"):
        count_cumsum([0, 1], 2)
    with pytest.raises(ShapeError, match=r"^E is -1; needed: at least 0$"):
        count_cumsum(torch.zeros(3, dtype=torch.int32), -1)


def test_values_and_dtypes_are_refused():
    given = arguments(make_layer(), make_tokens(4, 32))
    with pytest.raises(
        DTypeError, match=r"x .* is bfloat16, router_w .* is float32; convert one, or use autocast"
    ):
        moe_TC_softmax_topk_layer(**given | {"x": given["x"].bfloat16()})
    with pytest.raises(
        ConfigError, match=r"activation_type is 'swish'; needed: one of \['swiglu', .*\]"
    ):
        moe_TC_softmax_topk_layer(**given, activation_type="swish")
    with pytest.raises(ConfigError, match="use_fp8 is 'off'; needed: True, False or None"):
        moe_TC_softmax_topk_layer(**given, use_fp8="off")


# count_cumsum


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_counts_and_prefix_sum(dtype):
    x = torch.tensor([3, 0, -1, 3, 4, 99, 1, 3, -7, 2**31 - 1], dtype=dtype)
    counts, running = count_cumsum(x, 4)
    assert counts.tolist() == [1, 1, 0, 3] and running.tolist() == [1, 2, 2, 5]
    assert counts.dtype == running.dtype == torch.int32
    assert torch.equal(count_cumsum(x, 4, do_cumsum=False), counts)
    assert count_cumsum(x[::2], 4)[0].tolist() == [0, 1, 0, 1]


def test_counts_of_nothing():
    for values in ([], [-1, 4]):
        counts, running = count_cumsum(torch.tensor(values, dtype=torch.int64), 4)
        assert counts.tolist() == running.tolist() == [0, 0, 0, 0]


def test_counts_of_many():
    x = torch.randint(-3, 140, (5000,), generator=torch.Generator().manual_seed(0))
    counts, running = count_cumsum(x, 128)
    expected = [int((x == e).sum()) for e in range(128)]
    assert counts.tolist() == expected and running.tolist() == np.cumsum(expected).tolist()


def test_count_cumsum_refuses():
    with pytest.raises(ShapeError, match=r"x has shape \(2, 2\); needed: one axis"):
        count_cumsum(torch.zeros(2, 2, dtype=torch.int64), 4)
    for dtype in (torch.float32, torch.int16, torch.bool):
        with pytest.raises(DTypeError, match="needed: int32 or int64"):
            count_cumsum(torch.zeros(2, dtype=dtype), 4)


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


def test_quack_switch_decorates():
    assert enable_quack_gemm()(lambda: current_config().use_quack_gemm)() is True


def test_package_exports():
    for name in sonicmoe.__all__:
        assert getattr(sonicmoe, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'MoEE'"):
        sonicmoe.MoEE  # noqa: B018
