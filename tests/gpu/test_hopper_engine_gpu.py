"""The Hopper engine on the GPU: its numbers against the reference engine's emulation and fp64, and
its whole contract, bit for bit.
"""

from __future__ import annotations

import os
from dataclasses import replace

import processes
import pytest
import torch
from gpu.device import raw
from gpu.engine_cases import (
    FP8,
    E,
    H,
    I,
    build,
    check,
    digest,
    make_blocked_case,
    make_case,
    relative,
)
from gpu.engine_contract import EngineContract
from worlds import ROOT

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.compile_plan import plan
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.jit import no_compile
from sonicmoe.jit.child import search_path
from sonicmoe.jit.plan import ModelSpec

pytestmark = pytest.mark.gpu

OURS = HopperEngine()
TENSORS = ("out", "dx", "dprobs")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every kernel of this module, built in parallel; nothing below may compile."""
    build(plan(ModelSpec(E, H, I), SonicMoEConfig(fp8_mode="perf").resolve()))
    with no_compile():
        yield


class TestHopperEngine(EngineContract):
    engine, settings = OURS, FP8
    bias = False
    sizes_of_no_tile = ((16, 64), (144, 64), (272, 192), (528, 320), (128, 1088))

    def test_tokens_and_gradients_of_very_different_size(self):
        """Scales of a row and of a block, 2^30 apart between tokens: each token has its own in
        forward.
        """
        case = make_case(300, topk=1, invalid=0.0, seed=6)
        small = self.run(case)["out"]
        case.x[150:] *= 2.0**30
        assert torch.equal(self.run(case)["out"][:150], small[:150])

    def test_a_long_sum_keeps_its_digits(self):
        """65536 tokens of one expert: a weight gradient is one sum of them, and a tensor core keeps
        few bits of it.
        """
        sizes = {"hidden": 256, "intermediate": 128, "experts": 1, "topk": 1}
        self.check(make_case(65536, **sizes, invalid=0.0, empty=(), seed=8))

    # ---- the same bits ----

    def test_another_process(self):
        code = (
            "from gpu.engine_cases import FP8, digest; from sonicmoe.engine.hopper import "
            "HopperEngine; print(digest(HopperEngine(), FP8))"
        )
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), search_path()])
        done = processes.run(["-c", code], os.environ | {"PYTHONPATH": path}, ROOT, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == digest(OURS, FP8)

    # ---- tensors of more than 2^31 elements ----

    @pytest.mark.large
    def test_rows_past_two_to_the_31_elements(self):
        """32 copies of a batch that fills whole blocks: every copy gives the bits it gives alone."""
        copies = 32
        alone = make_blocked_case(2048, hidden=2048, intermediate=2304, experts=8, topk=8, seed=50)
        wanted = self.run(alone)
        check(alone, OURS, FP8, wanted)
        names = ("x", "dout", "indices", "probs")
        big = replace(alone, **{name: getattr(alone, name).repeat(copies, 1) for name in names})
        assert big.routing().num_rows * 2 * 2304 > 2**31
        got = self.run(big)
        for name in TENSORS:
            for copy, found in enumerate(got[name].split(2048)):
                assert torch.equal(found, wanted[name]), (name, copy)
        for name in ("dw1", "dw2"):
            # A wrong address loses or doubles whole blocks; how many digits a long sum keeps has a
            # test of its own.
            assert bool((relative(got[name], copies * wanted[name]) < 0.05).all()), name

    @pytest.mark.large
    def test_weights_past_two_to_the_31_elements(self):
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
        wanted = self.run(few)
        check(few, OURS, FP8, wanted)
        got = self.run(case)
        for name in ("dw1", "dw2"):
            assert torch.equal(raw(got[name][picked]), raw(wanted[name])), name
            assert not bool(got[name][2].any()), name
        assert torch.equal(got["dprobs"][own >= 0], wanted["dprobs"][own >= 0])
