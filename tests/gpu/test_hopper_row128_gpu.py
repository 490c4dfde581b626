"""Recipe `row128` on the Hopper engine: its numbers against the reference engine's emulation and
fp64 on rows of every kind, and what must not change a bit. `test_quantize_gpu.py` and
`test_wgrad_operands_gpu.py` compare its quantisers and operands bit for bit.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from gpu.hopper_cases import (
    FP8,
    OURS,
    REFERENCE,
    E,
    H,
    I,
    assert_same_bits,
    check,
    errors,
    fill_free_memory,
    make_case,
    run,
    run_with_stages,
)

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.enums import ZCode
from sonicmoe.jit import default_cache, no_compile
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.kernels.quack_gemm import MlpShape, expert_rows_source, wgrad_kernels
from sonicmoe.kernels.sm90 import engine_sources
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import quantize

pytestmark = pytest.mark.gpu

STEADY = next(name for name in HOPPER.recipes if name is not None and name.startswith("row128"))
ROW128 = replace(FP8, recipe=RECIPES[STEADY])
NAMES = ("out", "dx", "dprobs", "dw1", "dw2")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every kernel of this module, built in parallel; nothing below may compile."""
    spec = ModelSpec(E, H, I)
    jobs = (
        expert_rows_source("sm_90a"),
        *wgrad_kernels(MlpShape(H, I, FP8.activation, arch="sm_90a")),
    )
    for activation in HOPPER.activations:
        jobs += tuple(engine_sources("sm_90a", activation, steady=True))
    for code in (ZCode.INT8, ZCode.BF16):
        for steady in (True, False):
            jobs += tuple(engine_sources("sm_90a", FP8.activation, z=code, steady=steady))
    report = warm_up(
        spec, default_cache(), jobs=os.cpu_count(), compile_jobs=tuple(dict.fromkeys(jobs))
    )
    assert report.complete, [outcome.message for outcome in report.kernels if outcome.message]
    with no_compile():
        yield


def spread_rows(case):
    """Tokens up to 2^12 apart."""
    generator = torch.Generator("cuda").manual_seed(7)
    size = (len(case.x), 1)
    factors = (
        torch.exp2(12 * torch.rand(size, generator=generator, device="cuda") - 12) for _ in range(2)
    )
    x, dout = (
        (t * f).to(torch.bfloat16) for t, f in zip((case.x, case.dout), factors, strict=True)
    )
    return replace(case, x=x, dout=dout)


def outlier_channels(case):
    """1 % of the channels are 100 times larger."""
    x, dout = case.x.clone(), case.dout.clone()
    x[:, 5::100] *= 100
    dout[:, 17::100] *= 100
    return replace(case, x=x, dout=dout)


def uneven_blocks(case, octaves=13):
    """Some blocks of 128 columns lie 2^octaves below the others, in every third row of x, in another
    third of dout, and in the weights that they meet.
    """
    x, dout, w1, w2 = (t.clone() for t in (case.x, case.dout, case.w1, case.w2))
    x[::3, 128:256] *= 2.0**-octaves
    x[1::6, :128] *= 2.0**octaves
    dout[1::3, :128] *= 2.0**-octaves
    w1[:, :128, 256:384] *= 2.0**-octaves
    w2[:, 384:, :128] *= 2.0**-octaves
    return replace(case, x=x, dout=dout, w1=w1, w2=w2)


KINDS = {
    "gaussian": lambda case: case,
    "rows apart": spread_rows,
    "outlier channels": outlier_channels,
    "blocks apart": uneven_blocks,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [60, 61])
def test_matches_the_emulation_and_fp64(kind, seed):
    check(KINDS[kind](make_case(seed=seed)), ROW128)


@pytest.mark.parametrize("activation", HOPPER.activations, ids=lambda a: a.value)
def test_every_activation(activation):
    check(make_case(600, activation=activation, seed=62), ROW128)


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(128, 64), (272, 192), (2880, 320), (1536, 704), (3072, 1536)]
)
def test_sizes(hidden, intermediate):
    """Half a block of dy1 at the end of I, a part of a block of H, more blocks than a batch of scales."""
    check(make_case(500, hidden=hidden, intermediate=intermediate, seed=63), ROW128)


@pytest.mark.parametrize("tokens", [1, 127, 128, 3000])
def test_numbers_of_tokens(tokens):
    check(make_case(tokens, seed=64), ROW128)


@pytest.mark.parametrize("kind", ["gaussian", "blocks apart"])
def test_z_in_bf16(kind):
    check(KINDS[kind](make_case(seed=65)), replace(ROW128, save_z=ZCode.BF16))


def test_weight_gradients_are_folded():
    """Not those of values that were quantised twice: they are as near the emulation as its own
    rounding, and the emulation without folding is further away.
    """
    case = make_case(2000, seed=66)
    got, folded = run(case, settings=ROW128), run(case, REFERENCE, ROW128)
    unfolded = run(case, REFERENCE, FP8)
    for name in ("dw1", "dw2"):
        near, far = (
            float(errors(name, got[name], other[name], case).mean()) for other in (folded, unfolded)
        )
        assert near < 0.5 * far, (name, near, far)


@pytest.fixture(scope="module")
def case():
    return uneven_blocks(make_case(900, seed=70))


@pytest.fixture(scope="module")
def wanted(case):
    return run(case, settings=ROW128)


def sent(tokens, block):
    q = quantize(tokens.float(), block)
    return BlockScaledTensor.from_bytes(q.bytes, q.scale_inv, block.extent, q.code)


class TestSameBits:
    @pytest.mark.parametrize("change", ["recompute_z", "frees_stagewise"])
    def test_memory_modes(self, case, wanted, change):
        assert_same_bits(run(case, settings=replace(ROW128, **{change: True})), wanted)

    def test_repetition(self, case, wanted):
        for _ in range(10):
            assert_same_bits(run(case, settings=ROW128), wanted)

    def test_a_sender_that_quantises_alike(self, case, wanted):
        block = ROW128.recipe.x
        for names in (("x",), ("dout",), ("x", "dout")):
            given = {name: sent(getattr(case, name), block) for name in names}
            assert_same_bits(run_sent(case, **given), wanted)

    def test_plain_weight_gradients_change_no_other_tensor(self, case, wanted):
        plain = run(case, settings=replace(ROW128, fp8_wgrad=False))
        assert_same_bits(plain, wanted, ("out", "dx", "dprobs"))

    def test_tokens_do_not_know_their_neighbours(self, case):
        """A warp rescales for all of its rows where one of them changes its scale; the forward of
        the others keeps its bits.
        """
        even = make_case(900, seed=70)
        quiet = run(even, settings=ROW128)["out"]
        x = even.x.clone()
        x[7::16, 128:256] *= 2.0**-13
        changed = run(replace(even, x=x), settings=ROW128)["out"]
        others = torch.arange(len(x), device="cuda") % 16 != 7
        assert torch.equal(changed[others], quiet[others])
        assert not torch.equal(changed, quiet)

    def test_unwritten_memory_is_never_read(self, case):
        fill_free_memory(0)
        zeroed = run_with_stages(case, ROW128)
        fill_free_memory(0xFF)
        assert_same_bits(run_with_stages(case, ROW128), zeroed)

    def test_weights_that_change_in_place(self, case):
        case = replace(case, w1=case.w1.clone(), w2=case.w2.clone())
        before = run(case, settings=ROW128)
        case.w1.mul_(-1)
        case.w2.mul_(2)
        after = run(case, settings=ROW128)
        assert not torch.equal(before["out"], after["out"])
        assert_same_bits(run(replace(case), settings=ROW128), after)


def run_sent(case, x=None, dout=None):
    """`run` with tokens, or their gradients, that their sender has quantised."""
    weights = OURS.prepare_weights(case.w1, case.w2, None, None, ROW128)
    out, saved = OURS.forward(x or case.x, case.routing(), weights, ROW128)
    sums = case.accumulators()
    dx, dprobs = OURS.backward(dout or case.dout, saved, weights, sums)
    return dict(zip(NAMES, (out, dx, dprobs, sums.dw1, sums.dw2), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_usual_sender(kind):
    """One scale for every row and 128 columns: codes of the largest are kept, the others rounded."""
    case = KINDS[kind](make_case(800, seed=71))
    unused = ~case.valid.any(1)
    given = {name: sent(getattr(case, name), rows(128)) for name in ("x", "dout")}
    weights = REFERENCE.prepare_weights(case.w1, case.w2, None, None, ROW128)
    out, saved = REFERENCE.forward(given["x"], case.routing(), weights, ROW128)
    sums = case.accumulators()
    dx, dprobs = REFERENCE.backward(given["dout"], saved, weights, sums)
    emulated = dict(zip(NAMES, (out, dx, dprobs, sums.dw1, sums.dw2), strict=True))
    for q in given.values():  # tokens of nobody
        q.bytes[unused], q.scale_inv[unused] = 0x7F, float("nan")
    got = run_sent(case, **given)
    for name in NAMES:
        assert bool(torch.isfinite(got[name]).all()), name
        slack = 0.06 if name == "dprobs" else 0.03
        assert float(errors(name, got[name], emulated[name], case).mean()) < slack, name


class TestNonFinite:
    @pytest.mark.parametrize("where", ["x", "dout"])
    @pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
    def test_one_bad_element(self, where, value):
        """Its experts' gradients are NaN throughout, and nobody else's."""
        case = make_case(400, invalid=0.0, topk=1, seed=72)
        clean, token = run(case, settings=ROW128), 0
        expert = int(case.indices[token, 0])
        bad = getattr(case, where).clone()
        bad[token, 3] = value
        spoilt = run(replace(case, **{where: bad}), settings=ROW128)
        others = [e for e in range(E) if e != expert]
        for name in ("dw1", "dw2"):
            assert torch.equal(spoilt[name][others], clean[name][others]), name
        whole = ("dw1", "dw2") if where == "x" else ("dw1",)
        for name in whole:
            assert bool(torch.isnan(spoilt[name][expert]).all()), name
        elsewhere = torch.arange(len(case.x), device="cuda") != token
        for name in ("out", "dx", "dprobs"):
            same = elsewhere if name == "out" else case.indices[:, 0] != expert
            assert torch.equal(spoilt[name][same], clean[name][same]), name


def test_an_expert_without_tokens_is_left_untouched():
    case, empty = make_case(300, empty=(0, 4, 5), seed=73), [0, 4, 5]
    accumulators = case.accumulators()
    for tensor in accumulators.tensors():
        tensor.normal_()
    before = [tensor.clone() for tensor in accumulators.tensors()]
    run(case, settings=ROW128, accumulators=accumulators)
    for old, new in zip(before, accumulators.tensors(), strict=True):
        assert torch.equal(old[empty], new[empty])
        assert not bool((old[[1, 2, 3]] == new[[1, 2, 3]]).all())


def test_it_is_a_recipe_of_its_own():
    config = SonicMoEConfig(engine="hopper", fp8_mode="perf", recipe=STEADY)
    assert config.resolve().recipe == STEADY
