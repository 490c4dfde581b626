"""`MoE` against the fp64 golden, against its plain PyTorch backend, in every precision, and the
load-balancing loss; `moe_TC_softmax_topk_layer`, `count_cumsum` and `enable_quack_gemm`.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, relative_rmse, torch
from functional.layer_golden import (
    assert_close,
    assert_same_bits,
    batch,
    flat,
    golden_layer,
    make_layer,
    make_tokens,
    run_layer,
    views,
)

import sonicmoe
from sonicmoe import (
    KernelBackendMoE,
    SonicMoEConfig,
    count_cumsum,
    enable_quack_gemm,
    moe_TC_softmax_topk_layer,
)
from sonicmoe.config import current_config
from sonicmoe.enums import ActivationType
from sonicmoe.functional import (
    freeze_weights,
    moe_general_routing_inputs_fp8,
    moe_TC_softmax_topk_layer_fp8,
)
from sonicmoe.integrations.frozen import freeze_experts
from sonicmoe.moe import switch_loss

SWIGLU = ActivationType.SWIGLU
PLAIN = {"kernel_backend_moe": KernelBackendMoE.torch}


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)], ids=["bf16", "fp16"]
)
def test_half_precision_parameters(dtype, bound):
    moe = make_layer(bias=True).to(dtype)
    x, dout = batch(dtype=dtype)
    run = run_layer(moe, x, dout)
    dtypes = {name: value.dtype for name, value in flat(run).items()}
    assert dtypes.pop("aux") == torch.float32
    assert set(dtypes.values()) == {dtype}
    # The golden chooses experts from exact logits: this seed's choice does not hang on the
    # rounding.
    assert_close(run, golden_layer(moe, x, dout), bound, floor=1e-5)
    assert_close(run, run_layer(moe, x, dout, **PLAIN), 2 * bound)


def test_autocast():
    # Values that bf16 holds: rounding the operands then changes nothing, the choice of experts
    # included.
    moe = make_layer(bias=True).bfloat16().float()
    x, dout = (make_tokens(19, 32, seed=seed, dtype=torch.bfloat16).float() for seed in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        run, plain = run_layer(moe, x, dout), run_layer(moe, x, dout, **PLAIN)
    assert run[0].dtype == torch.bfloat16, "the experts computed in the dtype of the parameters"
    assert {gradient.dtype for gradient in run[2].values()} == {torch.float32}
    expected = golden_layer(moe, x, dout)
    assert_close(run, expected, 0.03, floor=1e-4)
    assert_close(plain, expected, 0.03, floor=1e-4)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert_close(run_layer(moe, x, dout), expected, 2e-6)


@pytest.mark.parametrize("backend", list(KernelBackendMoE)[1:], ids=lambda b: b.value)
def test_any_leading_shape(backend):
    moe, dout = make_layer(bias=True), make_tokens(24, 32, seed=2)
    tokens = make_tokens(24, 32)
    expected = flat(run_layer(moe, tokens, dout, kernel_backend_moe=backend))
    for shape in ((2, 12, 32), (2, 3, 4, 32)):
        given = tokens.reshape(shape), dout.reshape(shape)
        run = flat(run_layer(moe, *given, kernel_backend_moe=backend))
        assert run["out"].shape == run["x"].shape == shape
        flattened = {name: run[name].reshape(wanted.shape) for name, wanted in expected.items()}
        assert all(map(torch.equal, flattened.values(), expected.values()))
    # One row is another matrix kernel.
    torch.testing.assert_close(moe(tokens[0], backend)[0], expected["out"][0])


# The load-balancing loss


def test_aux_loss_is_upstreams_product_of_normalised_shares():
    torch.manual_seed(0)
    frequency = torch.tensor([7, 0, 3, 2], dtype=torch.int32)
    values = []
    for formula in (switch_loss, upstream_loss):
        logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(3), requires_grad=True)
        loss = formula(logits, frequency)
        loss.backward()
        values.append((loss.item(), numpy(logits.grad)))
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-6)
    np.testing.assert_allclose(values[0][1], values[1][1], atol=1e-8)
    assert np.abs(values[0][1]).max() > 1e-3


def upstream_loss(logits, frequency):
    """E times the inner product of the L1-normalised probability mass and the L1-normalised slot
    counts.
    """
    mass = torch.softmax(logits, -1).sum(0)
    l1 = torch.nn.functional.normalize
    return logits.shape[1] * torch.dot(l1(mass, p=1, dim=0), l1(frequency.float(), p=1, dim=0))


def test_aux_loss_extremes():
    even = torch.zeros(8, 4)
    assert switch_loss(even, torch.full((4,), 2)).item() == pytest.approx(1.0)
    certain = torch.tensor([[50.0, 0, 0, 0]] * 8)
    assert switch_loss(certain, torch.tensor([8, 0, 0, 0])).item() == pytest.approx(4.0)
    assert switch_loss(torch.zeros(0, 4), torch.zeros(4, dtype=torch.int32)).item() == 0.0


# FP8


FP8_CASES = [
    # activated fp8_mode, environment, use_fp8, FP8 runs
    (None, None, None, False),
    (None, None, True, True),
    (None, "perf", None, True),
    (None, "perf", False, False),
    ("perf", None, None, True),
    ("mem", None, True, True),
    ("perf", "mem", False, False),
    ("off", "perf", None, False),
    ("off", "perf", True, True),
]


@pytest.mark.parametrize(("activated", "environment", "use_fp8", "wanted"), FP8_CASES)
def test_who_decides_about_fp8(activated, environment, use_fp8, wanted, monkeypatch, prepared):
    if environment is not None:
        monkeypatch.setenv("SONIC_MOE_FP8_MODE", environment)
    moe, x, dout = make_layer(), *batch()
    with SonicMoEConfig(fp8_mode=activated).activate():
        run = run_layer(moe, x, dout, use_fp8=use_fp8)
    assert [recipe is not None for recipe in prepared] == ([True] if wanted else [False, False]), (
        "unquantised: in backward too"
    )
    assert (relative_rmse(numpy(run[0]), golden_layer(moe, x, dout)[0]) > 0.005) == wanted


def test_fp8_needs_the_engine():
    moe, x = make_layer(), make_tokens(5, 32)
    with SonicMoEConfig(fp8_mode="perf").activate():
        assert relative_rmse(numpy(moe(x, **PLAIN)[0]), golden_layer(moe, x, x)[0]) < 1e-6


def test_upstreams_names_for_fp8():
    moe, x, dout = make_layer(), *batch()
    run = run_layer(moe, x, dout, use_fp8=True)
    fp8 = {"kernel_backend_moe": KernelBackendMoE.sonicmoe_fp8}
    for given in (fp8, fp8 | {"prequant_fp8_weights": True}):
        assert_same_bits(run_layer(moe, x, dout, **given), run)
    weights = moe.c_fc.weight, moe.c_proj.weight
    out, logits, _ = moe_TC_softmax_topk_layer_fp8(x, moe.router.weight, *weights, 2, "swiglu")
    assert torch.equal(out, run[0])
    chosen, ids = logits.topk(2)
    rows = torch.arange(len(x)).repeat_interleave(2)
    triples = torch.softmax(chosen, -1).flatten(), rows, ids.flatten()
    out, _ = moe_general_routing_inputs_fp8(x, *triples, *weights, 5, "swiglu")
    assert torch.equal(out, run[0])


# moe_TC_softmax_topk_layer


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


def test_codes_come_in_the_place_of_weights():
    """tests/oracle has their numbers and layouts."""
    moe, x = make_layer(bias=True), make_tokens(19, 32)
    given = arguments(moe, x)
    given["w1"], given["w2"], lost = freeze_weights(given["w1"], given["w2"])
    out = moe_TC_softmax_topk_layer(**given, use_fp8=True)[0]
    assert freeze_experts(moe) == lost and 0.01 < lost.error < 0.05
    assert torch.equal(out, moe(x, use_fp8=True)[0])


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
