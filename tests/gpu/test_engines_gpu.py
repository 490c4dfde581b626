"""Engines on a GPU beside the cases of tests/oracle. Any part of the GPU computes the same bits, wrong counts
lose rows and harm nothing else, and tensors may have more than 2^31 elements.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.device import raw
from gpu.engine_cases import BF16, FP8, check, make_case, relative, run

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.triton import TritonEngine

pytestmark = pytest.mark.gpu

H, I = 256, 128  # for which Triton compiles tests/oracle's cases
HOPPER = HopperEngine()


ENGINES = pytest.mark.parametrize(
    ("engine", "settings"),
    [(HOPPER, FP8), (Bf16Engine(), EngineSettings()), (TritonEngine(), EngineSettings())],
    ids=["hopper", "bf16", "triton"],
)


@ENGINES
def test_the_same_bits_on_any_part_of_the_gpu(engine, settings):
    """The work that a CTA gets depends on how many there are; with 3, one cluster takes
    everything.
    """
    case = make_case(4096, hidden=2048, intermediate=1408, experts=8, topk=4, empty=(), seed=20)
    wanted = run(case, engine, settings)
    for lent in (0,) * 8 + (3, 37, 100):
        found = run(case, engine, replace(settings, gemm_num_sms=lent))
        assert all(torch.equal(raw(found[name]), raw(wanted[name])) for name in wanted), lent


@ENGINES
def test_counts_too_small_lose_rows_and_nothing_else(engine, settings):
    """The offsets then pass the rows there are, and no kernel may follow them."""
    case, counts = make_case(600, hidden=H, intermediate=I, invalid=0.0), [128] * 6
    routing = case.routing(counts)
    assert int(routing.padded_offsets[-1]) > routing.num_rows
    got = run(case, engine, settings, counts=counts)
    torch.cuda.synchronize()
    lost = routing.slot_row < 0
    assert bool(lost.any()) and bool((got["dprobs"][lost] == 0).all())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in got.values())


@pytest.mark.large
@pytest.mark.parametrize("engine", [Bf16Engine(), TritonEngine()], ids=["bf16", "triton"])
def test_past_two_to_the_31_elements(engine):
    """A row's results do not depend on the other rows: the last 128 tokens alone give the bits that
    they give behind 8.4 million.
    """
    times = 2**31 // (128 * H) + 1
    sizes = {"hidden": H, "intermediate": I, "experts": 1, "topk": 1}
    case = make_case(128, **sizes, invalid=0.0, empty=())
    alone = run(case, engine)
    big = replace(
        case,
        x=case.x.repeat(times, 1),
        dout=torch.zeros((times * 128, H), dtype=BF16, device="cuda"),
        indices=case.indices.repeat(times, 1),
        probs=case.probs.repeat(times, 1),
    )
    big.dout[-128:] = case.dout
    got = run(big, engine)
    assert got["out"].numel() > 2**31
    assert bool((got["out"].view(times, 128, H) == alone["out"]).all())
    for name in ("dx", "dprobs"):
        assert torch.equal(got[name][-128:], alone[name]), name
        assert bool((got[name][:-128] == 0).all()), name
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name], alone[name]), name


class TestHopperPastTwoToThe31Elements:
    @pytest.mark.large
    def test_rows(self):
        """32 copies of a batch that fills whole blocks: every copy gives the bits it gives alone."""
        copies, experts, tokens = 32, 8, 2048
        sizes = {"hidden": 2048, "intermediate": 2304, "experts": experts, "topk": experts}
        alone = make_case(tokens, **sizes, empty=(), seed=50)
        # Experts take turns at blocks of 128 tokens, which quantise in the same blocks everywhere.
        turn = torch.arange(tokens, device="cuda").unsqueeze(1) // 128
        alone.indices = (turn + torch.arange(experts, device="cuda")) % experts
        wanted = run(alone, HOPPER, FP8)
        check(alone, HOPPER, FP8, wanted)
        names = ("x", "dout", "indices", "probs")
        big = replace(alone, **{name: getattr(alone, name).repeat(copies, 1) for name in names})
        assert big.routing().num_rows * 2 * 2304 > 2**31
        got = run(big, HOPPER, FP8)
        for name in ("out", "dx", "dprobs"):
            for copy, found in enumerate(got[name].split(tokens)):
                assert torch.equal(found, wanted[name]), (name, copy)
        for name in ("dw1", "dw2"):
            # A wrong address loses or doubles whole blocks; how many digits a long sum keeps has a
            # test of its own.
            assert bool((relative(got[name], copies * wanted[name]) < 0.05).all()), name

    @pytest.mark.large
    def test_weights(self):
        """The first, middle and last experts of 128 give the bits they give in a layer of their
        own.
        """
        experts, picked = 128, [0, 1, 63, 64, 126, 127]
        sizes = {"hidden": 4096, "intermediate": 2304, "experts": experts, "topk": 8}
        case = make_case(2000, **sizes, empty=(2,), seed=51)
        w1, w2, *_ = case.weights
        assert w1.numel() > 2**31
        place = torch.full((experts + 1,), -1, device="cuda")
        place[picked] = torch.arange(len(picked), device="cuda")
        own = torch.where(case.valid, place[case.indices.clamp(0, experts)], -1)
        weights = (w1[picked].contiguous(), w2[picked].contiguous(), None, None)
        few = replace(case, indices=own, weights=weights)
        wanted = run(few, HOPPER, FP8)
        check(few, HOPPER, FP8, wanted)
        got = run(case, HOPPER, FP8)
        for name in ("dw1", "dw2"):
            assert torch.equal(raw(got[name][picked]), raw(wanted[name])), name
            assert not bool(got[name][2].any()), name
        assert torch.equal(got["dprobs"][own >= 0], wanted["dprobs"][own >= 0])
