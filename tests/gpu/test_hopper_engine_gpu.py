"""The Hopper engine on the GPU: its numbers against the reference engine's emulation and fp64, and
its whole contract, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu.activation_cases import OWN
from gpu.hopper_cases import (
    FP8,
    GATES,
    OURS,
    E,
    H,
    I,
    assert_same_bits,
    check,
    digest,
    errors,
    fill_free_memory,
    make_blocked_case,
    make_case,
    raw,
    run,
    run_with_stages,
)
from public_models import EXPERT_SIZES

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.compile_plan import plan
from sonicmoe.engine.select import unavailable
from sonicmoe.engine.settings import Workload
from sonicmoe.enums import ActivationType, EngineName, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.jit import default_cache, no_compile
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.kernels.quack_gemm import (
    MlpShape,
    expert_rows_source,
    wgrad_kernels,
)
from sonicmoe.kernels.sm90 import engine_sources

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PLAIN_WGRAD = replace(FP8, fp8_wgrad=False)
WGRADS = pytest.mark.parametrize("settings", [FP8, PLAIN_WGRAD], ids=["fp8 wgrad", "plain wgrad"])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every kernel of this module, built in parallel; nothing below may compile."""
    spec, shape = ModelSpec(E, H, I), MlpShape(H, I, ActivationType.SWIGLU, arch="sm_90a")
    plain = (expert_rows_source("sm_90a"), *wgrad_kernels(shape))
    jobs = (*plan(spec, SonicMoEConfig(fp8_mode="perf").resolve()), *plain)
    # The fused GEMMs are compiled for one activation.
    for activation in HOPPER.activations:
        jobs += tuple(engine_sources("sm_90a", activation))
        jobs += tuple(engine_sources("sm_90a", activation, OWN.get(activation, ())))
        jobs += tuple(engine_sources("sm_90a", activation, z=ZCode.BF16))
    report = warm_up(
        spec, default_cache(), jobs=os.cpu_count(), compile_jobs=tuple(dict.fromkeys(jobs))
    )
    assert report.complete, [outcome.message for outcome in report.kernels if outcome.message]
    with no_compile():
        yield


@pytest.mark.parametrize("sizes", EXPERT_SIZES.values(), ids=EXPERT_SIZES)
def test_this_gpu_can_run_public_models(sizes):
    assert unavailable(EngineName.HOPPER, "cuda:0", Workload(FP8, *sizes)) is None


@pytest.mark.parametrize(
    ("sizes", "words"), [((2056, 768), "H is 2056 and I is 768"), ((2048, 736), "I is 736")]
)
def test_sizes_without_a_kernel_are_refused(sizes, words):
    assert words in unavailable(EngineName.HOPPER, "cuda:0", Workload(FP8, *sizes))


def test_settings_without_a_kernel_are_refused():
    case = make_case(8)
    with pytest.raises(ConfigError, match="FP8 is off"):
        OURS.prepare_weights(case.w1, case.w2, None, None, replace(FP8, recipe=None))


class TestNumbers:
    @pytest.mark.parametrize("activation", GATES, ids=lambda a: a.value)
    def test_every_activation(self, activation):
        check(make_case(activation=activation))

    @WGRADS
    @pytest.mark.parametrize("activation", GATES, ids=lambda a: a.value)
    def test_z_kept_in_bf16(self, activation, settings):
        case, settings = (
            make_case(activation=activation, seed=9),
            replace(settings, save_z=ZCode.BF16),
        )
        check(case, settings)
        again = run(case, settings=replace(settings, recompute_z=True))
        assert_same_bits(again, run(case, settings=settings), ("out", "dx", "dprobs"))

    @WGRADS
    @pytest.mark.parametrize("activation", [a for a in OWN if a in GATES], ids=lambda a: a.value)
    def test_parameters_of_a_layer(self, activation, settings):
        case = make_case(activation=activation)
        defaults = run(case)["out"].float()
        case = replace(case, parameters=OWN[activation])
        check(case, settings)
        assert not torch.allclose(run(case)["out"].float(), defaults, rtol=0.1, atol=0.1)

    @pytest.mark.parametrize(("hidden", "intermediate"), EXPERT_SIZES.values(), ids=EXPERT_SIZES)
    def test_sizes_of_public_models(self, hidden, intermediate):
        few = hidden * intermediate > 2**25
        options = {"experts": 2, "empty": ()} if few else {"experts": 4, "empty": (1,)}
        check(make_case(300, hidden=hidden, intermediate=intermediate, topk=2, seed=1, **options))

    @pytest.mark.parametrize(
        ("hidden", "intermediate"), [(16, 64), (144, 64), (272, 192), (528, 320), (128, 1088)]
    )
    def test_sizes_that_no_tile_divides(self, hidden, intermediate):
        check(make_case(400, hidden=hidden, intermediate=intermediate, seed=2))

    @pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 255, 257, 4095])
    def test_counts_around_the_tile(self, tokens):
        check(make_case(tokens, experts=2, topk=1, invalid=0.0, empty=(0,), seed=3))

    @pytest.mark.parametrize(
        ("tokens", "options"),
        [(3000, {"invalid": 0.99}), (64, {"invalid": 1.0}), (513, {"topk": 1, "invalid": 0.0, "empty": (0, 1, 2, 4, 5)})],
        ids=["99 % invalid", "all invalid", "one expert"],
    )  # fmt: skip
    def test_uneven_routing(self, tokens, options):
        check(make_case(tokens, seed=4, **options))

    def test_many_experts(self):
        check(make_case(600, experts=130, topk=4, empty=(0, 1, 64, 129), seed=5))

    def test_no_tokens(self):
        case = make_case(5).tokens(slice(0))
        got = run(case)
        assert (
            got["out"].shape == got["dx"].shape == (0, H)
            and got["dprobs"].shape == case.probs.shape
        )
        assert not bool(got["dw1"].any()) and not bool(got["dw2"].any())

    def test_tokens_and_gradients_of_very_different_size(self):
        """Scales of a row and of a block, 2^30 apart between tokens: each token has its own in
        forward.
        """
        case = make_case(300, topk=1, invalid=0.0, seed=6)
        small = run(case)["out"]
        case.x[150:] *= 2.0**30
        assert torch.equal(run(case)["out"][:150], small[:150])

    def test_plain_weight_gradients(self):
        case = make_case(seed=7)
        got = run(case, settings=PLAIN_WGRAD)
        check(case, PLAIN_WGRAD, got)
        assert_same_bits(got, run(case), ("out", "dx", "dprobs"))

    def test_a_long_sum_keeps_its_digits(self):
        """65536 tokens of one expert: a weight gradient is one sum of them, and a tensor core keeps
        few bits of it.
        """
        check(
            make_case(
                65536,
                hidden=256,
                intermediate=128,
                experts=1,
                topk=1,
                invalid=0.0,
                empty=(),
                seed=8,
            )
        )


@pytest.fixture(scope="module")
def case():
    return make_case(900, seed=20)


@pytest.fixture(scope="module")
def wanted(case):
    return run(case)


class TestSameBits:
    """What must not change a single bit of any result."""

    @pytest.mark.parametrize("change", ["recompute_z", "iso_weight", "frees_stagewise"])
    def test_memory_modes(self, case, wanted, change):
        assert_same_bits(run(case, settings=replace(FP8, **{change: True})), wanted)

    @pytest.mark.parametrize("activation", GATES, ids=lambda a: a.value)
    def test_all_memory_modes_together(self, activation):
        case = make_case(333, activation=activation, seed=22)
        frugal = replace(FP8, recompute_z=True, iso_weight=True, frees_stagewise=True)
        assert_same_bits(run(case, settings=frugal), run(case))

    def test_what_memory_modes_keep(self, case):
        weights, routing = OURS.prepare_weights(case.w1, case.w2, None, None, FP8), case.routing()
        _, saved = OURS.forward(case.x, routing, weights, replace(FP8, recompute_z=True))
        assert saved.z is None
        staged = replace(FP8, frees_stagewise=True)
        _, saved = OURS.forward(case.x, routing, weights, staged)
        assert saved.z.shape == (routing.num_rows, 2 * I)
        OURS.backward_dx(case.dout, saved, weights)
        assert saved.z is None and saved.x is None
        with pytest.raises(RuntimeError, match="released by an earlier backward"):
            OURS.backward_dx(case.dout, saved, weights)

    def test_inference(self, case, wanted):
        weights = OURS.prepare_weights(case.w1, case.w2, None, None, FP8)
        out, saved = OURS.forward(case.x, case.routing(), weights, FP8, save=False)
        assert saved is None and torch.equal(out, wanted["out"])

    def test_counts_given(self, case, wanted):
        counts = case.counts
        assert case.routing(counts).num_rows < case.routing().num_rows
        assert_same_bits(run(case, counts=counts), wanted)
        assert_same_bits(run(case, counts=[-(-count // 256) * 256 for count in counts]), wanted)

    def test_repetition(self, case, wanted):
        for _ in range(10):
            assert_same_bits(run(case), wanted)

    def test_another_process(self):
        code = "from gpu.hopper_cases import digest; print(digest())"
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == digest()

    @pytest.mark.parametrize("rows", [1, 124, 1000])
    def test_tokens_that_nobody_serves(self, case, wanted, rows):
        """Received from a dispatcher that pads its buffers, with anything in them."""

        def longer(tensor, value):
            return torch.cat(
                [
                    tensor,
                    torch.full((rows, tensor.shape[1]), value, dtype=tensor.dtype, device="cuda"),
                ]
            )

        nan = float("nan")
        padded = replace(
            case, x=longer(case.x, nan), dout=longer(case.dout, nan), indices=longer(case.indices, -1), probs=longer(case.probs, nan)
        )  # fmt: skip
        got = run(padded)
        for name in ("out", "dx", "dprobs"):
            assert not bool(got[name][len(case.x) :].any()), name
            got[name] = got[name][: len(case.x)]
        assert_same_bits(got, wanted)

    def test_probabilities_of_invalid_slots(self, case, wanted):
        assert_same_bits(
            run(replace(case, probs=torch.where(case.valid, case.probs, float("nan")))), wanted
        )

    @WGRADS
    def test_unwritten_memory_is_never_read(self, settings):
        """Results, and every stage tensor to the end of its padding rows."""
        case = make_case(333, seed=23)
        fill_free_memory(0)
        zeroed = run_with_stages(case, settings)
        stages = {name.split()[1].partition(".")[0] for name in zeroed if name.startswith("stage ")}
        assert {"z", "y1", "y2", "dz_fp8", "dz", "y1s", "dx_rows"} <= stages
        fill_free_memory(0xFF)  # NaN in every floating format, -1 in every integer
        assert_same_bits(run_with_stages(case, settings), zeroed)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills every fresh `torch.empty`
        try:
            assert_same_bits(run_with_stages(case, settings), zeroed)
        finally:
            torch.use_deterministic_algorithms(False)

    @WGRADS
    def test_other_spellings_of_the_operands(self, case, settings):
        """In strided views, off a 16-byte address, and a gradient in fp32."""

        def off(tensor):
            moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].reshape(
                tensor.shape
            )
            return moved.copy_(tensor)

        def strided(tensor):
            return torch.stack([tensor, tensor], 2)[..., 0]

        wanted = run(case, settings=settings)
        for x, dout in ((off, off), (strided, strided), (off, torch.Tensor.float)):
            assert_same_bits(
                run(replace(case, x=x(case.x), dout=dout(case.dout)), settings=settings), wanted
            )


class TestAccumulation:
    def test_micro_batches_add_up_to_one_large_batch(self):
        """Cut where no quantisation block is: tokens to the bit, weight gradients to the rounding
        of their sums.
        """
        large = make_blocked_case(2048, seed=30)
        halves = [large.tokens(slice(0, 1024)), large.tokens(slice(1024, 2048))]
        whole, accumulators = run(large), large.accumulators()
        pieces = [run(half, accumulators=accumulators) for half in halves]
        for name in ("out", "dx", "dprobs"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), whole[name]), name
        for name in ("dw1", "dw2"):
            # A tensor core keeps 14 bits of a sum, and the sums are cut in other places.
            assert float(errors(name, pieces[1][name], whole[name], large).max()) < 3e-3, name

    def test_the_second_backward_adds_to_the_first(self):
        first, second = make_case(500, seed=31), replace(make_case(300, seed=32))
        second = replace(second, w1=first.w1, w2=first.w2)
        alone = [run(case) for case in (first, second)]
        accumulators = first.accumulators()
        run(first, accumulators=accumulators)
        both = run(second, accumulators=accumulators)
        for name in ("dw1", "dw2"):
            assert torch.equal(both[name], alone[0][name] + alone[1][name]), name

    @WGRADS
    def test_an_expert_without_tokens_is_left_untouched(self, settings):
        case, empty = make_case(300, empty=(0, 4, 5), seed=33), [0, 4, 5]
        accumulators = case.accumulators()
        for tensor in accumulators.tensors():
            tensor.normal_()
        before = [tensor.clone() for tensor in accumulators.tensors()]
        run(case, settings=settings, accumulators=accumulators)
        for old, new in zip(before, accumulators.tensors(), strict=True):
            assert torch.equal(old[empty], new[empty])
            assert not bool((old[[1, 2, 3]] == new[[1, 2, 3]]).all())


def test_counts_too_small_lose_rows_and_nothing_else():
    """The offsets then pass the rows there are: no kernel may follow them."""
    case = make_case(600, invalid=0.0, seed=34)
    routing = case.routing([128] * E)
    assert int(routing.padded_offsets[-1]) > routing.num_rows
    got = run(case, counts=[128] * E)
    torch.cuda.synchronize()
    lost = routing.slot_row < 0
    assert bool(lost.any()) and bool((got["dprobs"][lost] == 0).all())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in got.values())


class TestNonFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
    def test_a_bad_token_stays_in_its_row_in_forward(self, value):
        case = make_case(400, invalid=0.0, seed=40)
        clean, bad = run(case)["out"], [0, 17, 399]
        case.x[bad, 5] = value
        spoilt = run(case)["out"]
        others = [t for t in range(400) if t not in bad]
        assert torch.equal(spoilt[others], clean[others])
        assert not bool(torch.isfinite(spoilt[bad]).any())

    @pytest.mark.parametrize("which", ["x", "dout"])
    def test_and_in_its_experts_in_backward(self, which):
        case = make_case(400, invalid=0.0, topk=1, seed=41)
        clean = run(case)
        token = 0  # the one an index of zero would gather
        expert = int(case.indices[token, 0])
        getattr(case, which)[token] = float("nan")
        spoilt, others = run(case), [e for e in range(E) if e != expert]
        elsewhere = case.indices[:, 0] != expert
        for name in ("dw1", "dw2"):
            assert torch.equal(spoilt[name][others], clean[name][others]), name
            assert not bool(torch.isfinite(spoilt[name][expert]).all()), name
        for name in ("out", "dx", "dprobs"):
            assert torch.equal(spoilt[name][elsewhere], clean[name][elsewhere]), name


class TestLarge:
    def test_rows_past_two_to_the_31_elements(self):
        """32 copies of a batch that fills whole blocks: every copy gives the bits it gives alone."""
        copies = 32
        alone = make_blocked_case(2048, hidden=2048, intermediate=2304, experts=8, topk=8, seed=50)
        wanted = run(alone)
        check(alone, got=wanted)
        repeated = {
            name: getattr(alone, name).repeat(copies, 1)
            for name in ("x", "dout", "indices", "probs")
        }
        big = replace(alone, **repeated)
        assert big.routing().num_rows * 2 * 2304 > 2**31
        got = run(big)
        for name in ("out", "dx", "dprobs"):
            for copy, found in enumerate(got[name].split(2048)):
                assert torch.equal(found, wanted[name]), (name, copy)
        for name in ("dw1", "dw2"):
            # A wrong address loses or doubles whole blocks; how many digits a long sum keeps has a
            # test of its own.
            assert float(errors(name, got[name], copies * wanted[name], big).max()) < 0.05, name

    def test_weights_past_two_to_the_31_elements(self):
        """The first, middle and last experts of 128 give the bits they give in a layer of their
        own.
        """
        experts, picked = 128, [0, 1, 63, 64, 126, 127]
        case = make_case(
            2000, hidden=4096, intermediate=2304, experts=experts, topk=8, empty=(2,), seed=51
        )
        assert case.w1.numel() > 2**31
        place = torch.full((experts + 1,), -1, device="cuda")
        place[picked] = torch.arange(len(picked), device="cuda")
        own = torch.where(case.valid, place[case.indices.clamp(0, experts)], -1)
        few = replace(
            case, indices=own, w1=case.w1[picked].contiguous(), w2=case.w2[picked].contiguous()
        )
        wanted = run(few)
        check(few, got=wanted)
        got = run(case)
        for name in ("dw1", "dw2"):
            assert torch.equal(raw(got[name][picked]), raw(wanted[name])), name
            assert not bool(got[name][2].any()), name
        assert torch.equal(got["dprobs"][own >= 0], wanted["dprobs"][own >= 0])
