"""What every engine that quantises nothing promises on a GPU: one class, whose subclass in a test
file names the engine. That file also compiles the kernels beforehand, so that nothing here compiles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.activation_cases import OWN
from gpu.plain_engine_cases import (
    BF16,
    FP16,
    MANY_TOKENS,
    REFERENCE,
    SIZES_OF_NO_TILE,
    SMALL,
    SWIGLU,
    E,
    H,
    I,
    K,
    assert_same_bits,
    check,
    fill_free_memory,
    make_case,
    run,
)
from public_models import EXPERT_SIZES

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.select import unavailable
from sonicmoe.engine.settings import Workload
from sonicmoe.enums import ActivationType, EngineName
from sonicmoe.routing.build import build_routing

GELU, RELU_SQ = ActivationType.GELU, ActivationType.RELU_SQ


class PlainEngineContract:
    """Numbers, routing, memory and order of an engine; `engine`: the one under test."""

    engine = None

    def rows_of(self, routing):
        """`(cu_rows [E + 1], gather index [R])` as the engine makes them for its kernels."""
        raise NotImplementedError

    def run(self, case, **options):
        return run(case, self.engine, **options)

    def check(self, case):
        check(case, self.run(case))

    def test_this_gpu_can_run_it(self):
        name = EngineName(self.engine.name)
        assert unavailable(name, "cuda:0") is None
        fp32 = Workload(EngineSettings(), H, I, "float32")
        assert "float32" in unavailable(name, "cuda:0", fp32)

    # ---- numbers ----

    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    @pytest.mark.parametrize("activation", ActivationType, ids=lambda a: a.value)
    def test_every_activation(self, activation, bias):
        self.check(make_case(activation=activation, bias=bias))

    @pytest.mark.parametrize("activation", OWN, ids=lambda a: a.value)
    def test_parameters_of_a_layer(self, activation):
        case = make_case(activation=activation)
        defaults = run(case, REFERENCE)["out"].float()
        case.parameters = OWN[activation]
        self.check(case)
        assert not torch.allclose(self.run(case)["out"].float(), defaults, rtol=0.1, atol=0.1)

    @pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=lambda a: a.value)
    def test_float16(self, activation):
        self.check(make_case(dtype=FP16, activation=activation))

    @pytest.mark.parametrize(("hidden", "intermediate"), EXPERT_SIZES.values(), ids=EXPERT_SIZES)
    def test_sizes_of_public_models(self, hidden, intermediate):
        few = hidden * intermediate > 2**25
        options = {"experts": 2, "empty": ()} if few else {"experts": 4, "empty": (1,)}
        self.check(make_case(300, hidden=hidden, intermediate=intermediate, topk=2, **options))

    @pytest.mark.parametrize(("hidden", "intermediate"), SIZES_OF_NO_TILE)
    def test_sizes_that_no_tile_divides(self, hidden, intermediate):
        self.check(make_case(300, hidden=hidden, intermediate=intermediate, bias=True))

    def test_past_two_to_the_31_elements(self):
        """A row's results do not depend on the other rows: the last 128 tokens alone give the bits
        they give behind 860 000.
        """
        (hidden, intermediate), times = SMALL, MANY_TOKENS // 128
        case = make_case(
            128, hidden=hidden, intermediate=intermediate, experts=1, topk=1, invalid=0.0, empty=()
        )
        alone = self.run(case)
        big = replace(
            case,
            x=case.x.repeat(times, 1),
            dout=torch.zeros((MANY_TOKENS, hidden), dtype=BF16, device="cuda"),
            indices=torch.zeros((MANY_TOKENS, 1), dtype=torch.int64, device="cuda"),
            probs=case.probs.repeat(times, 1),
        )
        big.dout[-128:] = case.dout
        assert MANY_TOKENS * 2 * intermediate > 2**31
        got = self.run(big)
        assert torch.equal(got["out"], alone["out"].repeat(times, 1))
        for name in ("dx", "dprobs"):
            assert torch.equal(got[name][-128:], alone[name]), name
            assert bool((got[name][:-128] == 0).all()), name
        for name in ("dw1", "dw2"):
            assert torch.equal(got[name], alone[name]), name

    # ---- routing ----

    @pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 255, 256, 257, 4095])
    def test_counts_around_the_tile(self, tokens):
        self.check(make_case(tokens, experts=2, topk=1, invalid=0.0, empty=(0,)))

    @pytest.mark.parametrize(
        ("tokens", "options"),
        [
            (3000, {"invalid": 0.99}),
            (64, {"invalid": 1.0}),
            (513, {"topk": 1, "invalid": 0.0, "empty": (0, 1, 2, 4, 5)}),
            (600, {"experts": 130, "topk": 4, "empty": (0, 1, 64, 129)}),
            (900, {"experts": 700, "topk": 4, "empty": (0, 1, 600, 699)}),
        ],
        ids=["99 % invalid", "all invalid", "one expert", "130 experts", "700 experts"],
    )
    def test_uneven_routing(self, tokens, options):
        self.check(make_case(tokens, **options))

    def test_no_tokens(self):
        case = make_case(5)
        operands = ("x", "dout", "indices", "probs")
        got = self.run(replace(case, **{name: getattr(case, name)[:0] for name in operands}))
        assert got["out"].shape == got["dx"].shape == (0, H) and got["dprobs"].shape == (0, K)
        assert bool((got["dw1"] == 0).all()) and bool((got["dw2"] == 0).all())

    @pytest.mark.parametrize(
        ("tokens", "experts", "invalid"),
        [(700, 6, 0.3), (40, 130, 0.5), (64, 3, 1.0), (2000, 2, 0.0), (500, 700, 0.2)],
    )
    def test_rows_of_experts(self, tokens, experts, invalid):
        """A padding row gathers what the last true row of its expert gathers."""
        routing = make_case(
            tokens, hidden=8, intermediate=8, experts=experts, topk=2, invalid=invalid, empty=()
        ).routing
        cu_rows, index = self.rows_of(routing)
        assert cu_rows.tolist() == routing.padded_offsets.tolist()
        token, wanted = routing.row_token.tolist(), [0] * routing.num_rows
        for first, count, padded in routing.expert_slices():
            spare = [token[first + count - 1]] * (padded - count)
            wanted[first : first + padded] = token[first : first + count] + spare
        assert index.tolist() == wanted

    def test_counts_too_small_lose_rows_and_nothing_else(self):
        """The offsets then pass the rows there are: no product may follow them."""
        case = make_case(600, invalid=0.0)
        routing = build_routing(case.indices, case.probs, E, [128] * E)
        assert int(routing.padded_offsets[-1]) > routing.num_rows
        assert int(self.rows_of(routing)[0][-1]) == routing.num_rows
        got = self.run(case, routing=routing)
        torch.cuda.synchronize()
        lost = routing.slot_row < 0
        assert bool(lost.any()) and bool((got["dprobs"][lost] == 0).all())
        assert all(bool(torch.isfinite(tensor).all()) for tensor in got.values())

    # ---- weight gradients ----

    def test_accumulates_over_micro_batches(self):
        first, second = make_case(500, bias=True, seed=1), make_case(300, bias=True, seed=2)
        second.weights = first.weights
        alone = [self.run(case) for case in (first, second)]
        accumulators = first.accumulators()
        self.run(first, accumulators=accumulators)
        both = self.run(second, accumulators=accumulators)
        for name in ("dw1", "dw2", "db1", "db2"):
            assert torch.equal(both[name], alone[0][name] + alone[1][name]), name

    def test_an_expert_without_tokens_is_left_untouched(self):
        case = make_case(300, bias=True, empty=(0, 4, 5))
        accumulators = case.accumulators()
        for tensor in accumulators.tensors():
            tensor.normal_()
        before = [tensor.clone() for tensor in accumulators.tensors()]
        self.run(case, accumulators=accumulators)
        for old, new in zip(before, accumulators.tensors(), strict=True):
            assert torch.equal(old[[0, 4, 5]], new[[0, 4, 5]])
            assert not bool((old[[1, 2, 3]] == new[[1, 2, 3]]).all())

    # ---- the same bits ----

    def test_equal_calls_give_equal_bits(self):
        case = make_case(2000, bias=True)
        assert_same_bits(self.run(case), self.run(case))

    @pytest.mark.parametrize("lent", [2, 37])
    def test_a_part_of_the_gpu_gives_the_same_bits(self, lent):
        case = make_case(2000, bias=True)
        wanted = self.run(case)
        assert_same_bits(self.run(case, settings=EngineSettings(gemm_num_sms=lent)), wanted)

    def test_recomputed_z_and_inference_give_the_same_bits(self):
        case = make_case(bias=True)
        stored = self.run(case)
        assert_same_bits(self.run(case, settings=EngineSettings(recompute_z=True)), stored)
        assert_same_bits(self.run(case, settings=EngineSettings(frees_stagewise=True)), stored)
        settings = EngineSettings()
        weights = self.engine.prepare_weights(*case.weights, settings)
        out, saved = self.engine.forward(case.x, case.routing, weights, settings, save=False)
        assert saved is None and torch.equal(out, stored["out"])

    def test_other_spellings_of_the_operands(self):
        """A gradient in fp32, tokens in a strided view and off a 16-byte address, on another
        stream.
        """
        case = make_case(200)
        wanted = self.run(case)
        off = torch.empty(case.x.numel() + 1, dtype=BF16, device="cuda")[1:].reshape(case.x.shape)
        off.copy_(case.x)
        strided = torch.stack([case.x, case.x], 2)[..., 0]
        for x in (off, strided):
            assert_same_bits(self.run(replace(case, x=x, dout=case.dout.float())), wanted)
        good = case.x.clone()
        case.x.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)
            case.x.copy_(good)
            got = self.run(case)
        torch.cuda.synchronize()
        assert_same_bits(got, wanted)

    def test_waits_for_nothing_and_can_be_captured(self):
        case, settings = make_case(900), EngineSettings()
        weights = self.engine.prepare_weights(*case.weights, settings)
        routing, wanted, accumulators = case.routing, self.run(case), case.accumulators()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, saved = self.engine.forward(case.x, routing, weights, settings)
                dx, dprobs = self.engine.backward(case.dout, saved, weights, accumulators)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        assert_same_bits({"out": out, "dx": dx, "dprobs": dprobs, **accumulators.named()}, wanted)

    # ---- memory that nobody wrote, and tokens that are NaN ----

    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    @pytest.mark.parametrize("activation", [SWIGLU, RELU_SQ], ids=lambda a: a.value)
    def test_unwritten_memory_is_never_read(self, activation, bias):
        case = make_case(333, activation=activation, bias=bias)
        fill_free_memory(0.0)
        zeroed = self.run(case)
        fill_free_memory(float("nan"))
        poisoned = self.run(case)
        # Fills every fresh `torch.empty` with NaN or the largest integer.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            filled = self.run(case)
        finally:
            torch.use_deterministic_algorithms(False)
        assert_same_bits(poisoned, zeroed)
        assert_same_bits(filled, zeroed)

    @pytest.mark.parametrize("activation", [SWIGLU, *OWN], ids=lambda a: a.value)
    @pytest.mark.parametrize("which", ["x", "dout"])
    def test_a_bad_token_spoils_its_own_experts_only(self, which, activation):
        case = make_case(400, invalid=0.0, topk=1, empty=(4,), activation=activation)
        clean = self.run(case)
        token = 0  # the one an index of zero would gather
        expert = int(case.indices[token, 0])
        getattr(case, which)[token] = float("nan")
        spoilt = self.run(case)
        others = [e for e in range(E) if e != expert]
        for name in ("dw1", "dw2"):
            assert torch.equal(spoilt[name][others], clean[name][others]), name
            assert not bool(torch.isfinite(spoilt[name][expert]).all()), name
        for name in ("out", "dx", "dprobs"):
            assert torch.equal(spoilt[name][1:], clean[name][1:]), name
