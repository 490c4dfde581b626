"""What every engine promises on a GPU beside the cases of tests/oracle, each expert and each 128 tokens
for themselves: sizes, routings, repeated bits, order and addresses. A class for all engines, and one
for those that quantise nothing. A subclass in a test file names the engine. That file also compiles
the kernels beforehand, so that nothing here compiles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.device import captured, waiting_is_an_error
from gpu.engine_cases import (
    BF16,
    MANY_TOKENS,
    SIZES_OF_MODELS,
    SIZES_OF_NO_TILE,
    SMALL,
    E,
    assert_same_bits,
    check,
    make_case,
    run,
)
from passes import backward

from sonicmoe.engine.bf16 import ExpertRows
from sonicmoe.engine.interface import EngineSettings


class EngineContract:
    """engine, settings: under test. bias: whether the cases have biases."""

    engine = None
    settings = EngineSettings()
    bias = True
    sizes_of_no_tile = SIZES_OF_NO_TILE

    def run(self, case, settings=None, **options):
        return run(case, self.engine, settings or self.settings, **options)

    def check(self, case):
        check(case, self.engine, self.settings)

    @pytest.fixture
    def case(self):
        return make_case(900, bias=self.bias, seed=20)

    @pytest.fixture
    def wanted(self, case):
        return self.run(case)

    def test_sizes(self):
        for hidden, intermediate in (*SIZES_OF_MODELS, *self.sizes_of_no_tile):
            options = {"hidden": hidden, "intermediate": intermediate, "bias": self.bias}
            self.check(make_case(300, experts=3, topk=2, empty=(1,), seed=1, **options))

    # ---- routing ----

    @pytest.mark.parametrize("tokens", [1, 127, 128, 129, 257, 4095])
    def test_counts_around_the_tile(self, tokens):
        self.check(make_case(tokens, experts=2, topk=1, invalid=0.0, empty=(0,), seed=3))

    @pytest.mark.parametrize(
        ("tokens", "options"),
        [
            (3000, {"invalid": 0.99}),
            (64, {"invalid": 1.0}),
            (513, {"topk": 1, "invalid": 0.0, "empty": (0, 1, 2, 4, 5)}),
            (900, {"experts": 700, "topk": 4, "empty": (0, 1, 600, 699)}),
        ],
        ids=["99 % invalid", "all invalid", "one expert", "700 experts"],
    )
    def test_uneven_routing(self, tokens, options):
        self.check(make_case(tokens, seed=4, **options))

    def test_counts_too_small_lose_rows_and_nothing_else(self):
        """The offsets then pass the rows there are: no kernel may follow them."""
        case = make_case(600, invalid=0.0, seed=34)
        routing = case.routing([128] * E)
        assert int(routing.padded_offsets[-1]) > routing.num_rows
        got = self.run(case, counts=[128] * E)
        torch.cuda.synchronize()
        lost = routing.slot_row < 0
        assert bool(lost.any()) and bool((got["dprobs"][lost] == 0).all())
        assert all(bool(torch.isfinite(tensor).all()) for tensor in got.values())

    # ---- the same bits ----

    def test_repetition(self, case, wanted):
        for _ in range(10):
            assert_same_bits(self.run(case), wanted)

    def test_inference(self, case, wanted):
        weights = self.engine.prepare_weights(*case.weights, self.settings)
        out, saved = self.engine.forward(case.x, case.routing(), weights, self.settings, save=False)
        assert saved is None and torch.equal(out, wanted["out"])


class PlainEngineContract(EngineContract):
    """Of engines that quantise nothing."""

    def rows_of(self, routing):
        """`(cu_rows [E + 1], gather index [R])` as the engine makes them for its kernels."""
        rows = ExpertRows.of(routing)
        return rows.cu_rows, rows.gather_index

    @pytest.mark.large
    def test_past_two_to_the_31_elements(self):
        """A row's results do not depend on the other rows: the last 128 tokens alone give the bits
        they give behind 860 000.
        """
        (hidden, intermediate), times = SMALL, MANY_TOKENS // 128
        sizes = {"hidden": hidden, "intermediate": intermediate, "experts": 1, "topk": 1}
        case = make_case(128, **sizes, invalid=0.0, empty=())
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

    @pytest.mark.parametrize(
        ("tokens", "experts", "invalid"),
        [(700, 6, 0.3), (40, 130, 0.5), (64, 3, 1.0), (2000, 2, 0.0), (500, 700, 0.2)],
    )
    def test_rows_of_experts(self, tokens, experts, invalid):
        """A padding row gathers what the last true row of its expert gathers."""
        sizes = {"hidden": 8, "intermediate": 8, "experts": experts, "topk": 2}
        routing = make_case(tokens, **sizes, invalid=invalid, empty=()).routing()
        cu_rows, index = self.rows_of(routing)
        assert cu_rows.tolist() == routing.padded_offsets.tolist()
        token, wanted = routing.row_token.tolist(), [0] * routing.num_rows
        for first, count, padded in routing.expert_slices():
            spare = [token[first + count - 1]] * (padded - count)
            wanted[first : first + padded] = token[first : first + count] + spare
        assert index.tolist() == wanted

    @pytest.mark.parametrize("lent", [2, 37])
    def test_a_part_of_the_gpu_gives_the_same_bits(self, case, wanted, lent):
        assert_same_bits(self.run(case, EngineSettings(gemm_num_sms=lent)), wanted)

    def test_waits_for_nothing_and_can_be_captured(self):
        case, settings = make_case(900), self.settings
        weights = self.engine.prepare_weights(*case.weights, settings)
        routing, wanted, accumulators = case.routing(), self.run(case), case.accumulators()

        def step():
            out, saved = self.engine.forward(case.x, routing, weights, settings)
            return out, *backward(self.engine, case.dout, saved, weights, accumulators)

        with waiting_is_an_error():
            graph, (out, dx, dprobs) = captured(step)
        graph.replay()
        assert_same_bits({"out": out, "dx": dx, "dprobs": dprobs, **accumulators.named()}, wanted)
