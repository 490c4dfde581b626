"""What every engine promises on a GPU: a class for all of them, and one for those that quantise
nothing. A subclass in a test file names the engine. That file also compiles the kernels beforehand,
so that nothing here compiles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.device import captured, fill_free_memory, waiting_is_an_error
from gpu.engine_cases import (
    BF16,
    MANY_TOKENS,
    SIZES_OF_NO_TILE,
    SMALL,
    SWIGLU,
    E,
    H,
    I,
    assert_same_bits,
    check_plain,
    make_case,
    run,
)
from pairwise import pairwise
from public_models import EXPERT_SIZES

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.select import unavailable
from sonicmoe.engine.settings import Workload
from sonicmoe.enums import ActivationType, EngineName

GELU, RELU_SQ = ActivationType.GELU, ActivationType.RELU_SQ


class EngineContract:
    """Numbers, routing, memory and order of an engine.

    engine, settings: under test. bias: whether the cases have biases. spreads: a bad token spoils
    the gradients of its expert's other tokens, too.
    """

    engine = None
    settings = EngineSettings()
    bias, spreads = True, False
    sizes_of_no_tile = SIZES_OF_NO_TILE

    def run(self, case, settings=None, **options):
        return run(case, self.engine, settings or self.settings, **options)

    def check(self, case, settings=None):
        raise NotImplementedError

    @pytest.fixture
    def case(self):
        return make_case(900, bias=self.bias, seed=20)

    @pytest.fixture
    def wanted(self, case):
        return self.run(case)

    # ---- numbers ----

    @pytest.mark.parametrize(("hidden", "intermediate"), EXPERT_SIZES.values(), ids=EXPERT_SIZES)
    @pytest.mark.large
    def test_sizes_of_public_models(self, hidden, intermediate):
        few = hidden * intermediate > 2**25
        options = {"experts": 2, "empty": ()} if few else {"experts": 4, "empty": (1,)}
        case = make_case(300, hidden=hidden, intermediate=intermediate, topk=2, seed=1, **options)
        self.check(case)

    def test_sizes_that_no_tile_divides(self):
        for hidden, intermediate in self.sizes_of_no_tile:
            self.check(
                make_case(400, hidden=hidden, intermediate=intermediate, bias=self.bias, seed=2)
            )

    # ---- routing ----

    @pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 255, 256, 257, 4095])
    def test_counts_around_the_tile(self, tokens):
        self.check(make_case(tokens, experts=2, topk=1, invalid=0.0, empty=(0,), seed=3))

    @pytest.mark.parametrize(
        ("tokens", "options"),
        [
            (3000, {"invalid": 0.99}),
            (64, {"invalid": 1.0}),
            (513, {"topk": 1, "invalid": 0.0, "empty": (0, 1, 2, 4, 5)}),
            (600, {"experts": 130, "topk": 4, "empty": (0, 1, 64, 129)}),
        ],
        ids=["99 % invalid", "all invalid", "one expert", "130 experts"],
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

    # ---- weight gradients ----

    def test_biases_by_themselves(self):
        """As often as asked, to the bits that go to accumulators; where nobody will ask, the rest has its
        bits.
        """
        if not self.engine.record.biases:
            pytest.skip("this engine has no biases")
        case = make_case(600, bias=True, seed=36)
        wanted, weights = self.run(case), self.engine.prepare_weights(*case.weights, self.settings)
        for asked in (True, False):
            _, saved = self.engine.forward(case.x, case.routing(), weights, self.settings)
            saved.wants_biases = asked
            dx, dprobs, pending = self.engine.backward_dx(case.dout, saved, weights)
            assert torch.equal(dx, wanted["dx"]) and torch.equal(dprobs, wanted["dprobs"])
            for _ in range(2 if asked else 0):
                db1, db2 = self.engine.bias_gradients(pending)
                assert torch.equal(db1, wanted["db1"]) and torch.equal(db2, wanted["db2"])

    # ---- the same bits ----

    def test_repetition(self, case, wanted):
        for _ in range(10):
            assert_same_bits(self.run(case), wanted)

    def test_inference(self, case, wanted):
        weights = self.engine.prepare_weights(*case.weights, self.settings)
        out, saved = self.engine.forward(case.x, case.routing(), weights, self.settings, save=False)
        assert saved is None and torch.equal(out, wanted["out"])

    def test_what_memory_modes_keep(self, case):
        staged = replace(self.settings, frees_stagewise=True)
        weights, routing = self.engine.prepare_weights(*case.weights, staged), case.routing()
        again = replace(self.settings, recompute_z=True)
        assert self.engine.forward(case.x, routing, weights, again)[1].z is None
        _, saved = self.engine.forward(case.x, routing, weights, staged)
        assert saved.z.shape == (routing.num_rows, 2 * I)
        self.engine.backward_dx(case.dout, saved, weights)
        assert saved.z is None and saved.x is None
        with pytest.raises(RuntimeError, match="released by an earlier backward"):
            self.engine.backward_dx(case.dout, saved, weights)

    def test_other_spellings_of_the_operands(self, case, wanted):
        """In strided views, off a 16-byte address, and a gradient in fp32; tokens that another
        stream writes late.
        """

        def off(tensor):
            room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
            return room[1:].reshape(tensor.shape).copy_(tensor)

        def strided(tensor):
            return torch.stack([tensor, tensor], 2)[..., 0]

        for x, dout in ((off, off), (strided, strided), (off, torch.Tensor.float)):
            assert_same_bits(self.run(case, x=x(case.x), dout=dout(case.dout)), wanted)
        late = torch.full_like(case.x, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)
            late.copy_(case.x)
            got = self.run(case, x=late)
        torch.cuda.synchronize()
        assert_same_bits(got, wanted)

    # ---- memory that nobody wrote, and tokens that are not finite ----

    def test_unwritten_memory_is_never_read(self):
        self.check_unwritten(make_case(333, bias=self.bias, seed=23), self.settings)

    def check_unwritten(self, case, settings):
        fill_free_memory(0)
        zeroed = self.observed(case, settings)
        fill_free_memory(0xFF)  # NaN in every floating format, -1 in every integer
        assert_same_bits(self.observed(case, settings), zeroed)
        with memory_full_of_nan("cuda"):
            assert_same_bits(self.observed(case, settings), zeroed)

    def observed(self, case, settings):
        """The tensors that must not depend on what memory held."""
        return self.run(case, settings)


class PlainEngineContract(EngineContract):
    """Of engines that quantise nothing."""

    def rows_of(self, routing):
        """`(cu_rows [E + 1], gather index [R])` as the engine makes them for its kernels."""
        raise NotImplementedError

    def check(self, case, settings=None):
        check_plain(case, self.run(case, settings))

    def test_this_gpu_can_run_it(self):
        name = EngineName(self.engine.name)
        assert unavailable(name, "cuda:0") is None
        fp32 = Workload(EngineSettings(), H, I, "float32")
        assert "float32" in unavailable(name, "cuda:0", fp32)

    def test_700_experts(self):
        self.check(make_case(900, experts=700, topk=4, empty=(0, 1, 600, 699)))

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
            return out, *self.engine.backward(case.dout, saved, weights, accumulators)

        with waiting_is_an_error():
            graph, (out, dx, dprobs) = captured(step)
        graph.replay()
        assert_same_bits({"out": out, "dx": dx, "dprobs": dprobs, **accumulators.named()}, wanted)

    @pytest.mark.parametrize(
        ("activation", "bias"), pairwise([SWIGLU, RELU_SQ], [False, True]), ids=str
    )
    def test_unwritten_memory_of_other_layers(self, activation, bias):
        case = make_case(333, activation=activation, bias=bias, seed=23)
        self.check_unwritten(case, replace(self.settings, activation=activation))
