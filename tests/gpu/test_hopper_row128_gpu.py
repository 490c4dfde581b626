"""Recipe `row128` on the Hopper engine: its contract, its numbers on rows of every kind, and what
folding changes. `test_quantize_gpu.py` and `test_wgrad_operands_gpu.py` compare its quantisers and
operands bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.engine_cases import (
    ARCH,
    FP8,
    REFERENCE,
    E,
    H,
    I,
    assert_same_bits,
    build,
    check_fp8,
    errors,
    make_case,
    run,
    run_with_stages,
)
from gpu.engine_contract import NAMES, EngineContract

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.enums import ZCode
from sonicmoe.jit import no_compile
from sonicmoe.kernels.quack_gemm import MlpShape, expert_rows_source, wgrad_kernels
from sonicmoe.kernels.sm90 import engine_sources
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import quantize

pytestmark = pytest.mark.gpu

STEADY = next(name for name in HOPPER.recipes if name is not None and name.startswith("row128"))
OURS, ROW128 = HopperEngine(), replace(FP8, recipe=RECIPES[STEADY])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every kernel of this module, built in parallel; nothing below may compile."""
    jobs = [expert_rows_source(ARCH), *wgrad_kernels(MlpShape(H, I, FP8.activation, arch=ARCH))]
    for activation in HOPPER.activations:
        jobs += engine_sources(ARCH, activation, steady=True)
    for code in (ZCode.INT8, ZCode.BF16):
        for steady in (True, False):
            jobs += engine_sources(ARCH, FP8.activation, z=code, steady=steady)
    build(jobs)
    with no_compile():
        yield


def spread_rows(case):
    """Tokens up to 2^12 apart."""
    generator = torch.Generator("cuda").manual_seed(7)
    size, made = (len(case.x), 1), []
    for tokens in (case.x, case.dout):
        octaves = 12 * torch.rand(size, generator=generator, device="cuda") - 12
        made.append((tokens * torch.exp2(octaves)).to(torch.bfloat16))
    return replace(case, x=made[0], dout=made[1])


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
    x, dout, w1, w2 = (t.clone() for t in (case.x, case.dout, *case.weights[:2]))
    x[::3, 128:256] *= 2.0**-octaves
    x[1::6, :128] *= 2.0**octaves
    dout[1::3, :128] *= 2.0**-octaves
    w1[:, :128, 256:384] *= 2.0**-octaves
    w2[:, 384:, :128] *= 2.0**-octaves
    return replace(case, x=x, dout=dout, weights=(w1, w2, None, None))


KINDS = {
    "gaussian": lambda case: case,
    "rows apart": spread_rows,
    "outlier channels": outlier_channels,
    "blocks apart": uneven_blocks,
}


def sent(tokens, block):
    q = quantize(tokens.float(), block)
    return BlockScaledTensor.from_bytes(q.bytes, q.scale_inv, block.extent, q.code)


class TestRow128(EngineContract):
    engine, settings = OURS, ROW128
    bias, spreads = False, True
    sizes_of_no_tile = ((128, 64), (272, 192), (2880, 320), (1536, 704), (3072, 1536))

    @pytest.fixture
    def case(self):
        return uneven_blocks(make_case(900, seed=70))

    def check(self, case, settings=None):
        check_fp8(case, OURS, settings or ROW128)

    def observed(self, case, settings):
        return run_with_stages(case, OURS, settings)

    # The sizes above are those at which this recipe differs from the other one.
    test_sizes_of_public_models = None

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seed", [60, 61])
    def test_matches_the_emulation_and_fp64(self, kind, seed):
        self.check(KINDS[kind](make_case(seed=seed)))

    @pytest.mark.parametrize("activation", HOPPER.activations, ids=lambda a: a.value)
    def test_every_activation(self, activation):
        self.check(make_case(600, activation=activation, seed=62))

    @pytest.mark.parametrize("kind", ["gaussian", "blocks apart"])
    def test_z_in_bf16(self, kind):
        self.check(KINDS[kind](make_case(seed=65)), replace(ROW128, save_z=ZCode.BF16))

    def test_weight_gradients_are_folded(self):
        """Not those of values that were quantised twice: they are as near the emulation as its own
        rounding, and the emulation without folding is further away.
        """
        case = make_case(2000, seed=66)
        got, folded = self.run(case), run(case, REFERENCE, ROW128)
        unfolded = run(case, REFERENCE, FP8)
        for name in ("dw1", "dw2"):
            near, far = (
                float(errors(name, got[name], other[name], case).mean())
                for other in (folded, unfolded)
            )
            assert near < 0.5 * far, (name, near, far)

    def test_a_sender_that_quantises_alike(self, case, wanted):
        block = ROW128.recipe.x
        for names in (("x",), ("dout",), ("x", "dout")):
            given = {name: sent(getattr(case, name), block) for name in names}
            assert_same_bits(self.run(case, **given), wanted)

    def test_plain_weight_gradients_change_no_other_tensor(self, case, wanted):
        plain = self.run(case, replace(ROW128, fp8_wgrad=False))
        assert_same_bits(plain, wanted, ("out", "dx", "dprobs"))

    def test_tokens_do_not_know_their_neighbours(self):
        """A warp rescales for all of its rows where one of them changes its scale; the forward of
        the others keeps its bits.
        """
        even = make_case(900, seed=70)
        quiet = self.run(even)["out"]
        x = even.x.clone()
        x[7::16, 128:256] *= 2.0**-13
        changed = self.run(even, x=x)["out"]
        others = torch.arange(len(x), device="cuda") % 16 != 7
        assert torch.equal(changed[others], quiet[others])
        assert not torch.equal(changed, quiet)

    def test_weights_that_change_in_place(self, case):
        w1, w2 = (weight.clone() for weight in case.weights[:2])
        case = replace(case, weights=(w1, w2, None, None))
        before = self.run(case)
        w1.mul_(-1)
        w2.mul_(2)
        after = self.run(case)
        assert not torch.equal(before["out"], after["out"])
        assert_same_bits(self.run(replace(case)), after)

    @pytest.mark.parametrize("kind", KINDS)
    def test_tokens_of_the_usual_sender(self, kind):
        """One scale for every row and 128 columns: codes of the largest are kept, the others
        rounded.
        """
        case = KINDS[kind](make_case(800, seed=71))
        unused = ~case.valid.any(1)
        given = {name: sent(getattr(case, name), rows(128)) for name in ("x", "dout")}
        emulated = run(case, REFERENCE, ROW128, **given)
        for q in given.values():  # tokens of nobody
            q.bytes[unused], q.scale_inv[unused] = 0x7F, float("nan")
        got = self.run(case, **given)
        for name in NAMES:
            assert bool(torch.isfinite(got[name]).all()), name
            slack = 0.06 if name == "dprobs" else 0.03
            assert float(errors(name, got[name], emulated[name], case).mean()) < slack, name

    @pytest.mark.parametrize("where", ["x", "dout"])
    @pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
    def test_one_bad_element(self, where, value):
        """Its experts' gradients are NaN throughout, and nobody else's."""
        case = make_case(400, invalid=0.0, topk=1, seed=72)
        clean, token = self.run(case), 0
        expert = int(case.indices[token, 0])
        bad = getattr(case, where).clone()
        bad[token, 3] = value
        spoilt = self.run(case, **{where: bad})
        others = [e for e in range(E) if e != expert]
        for name in ("dw1", "dw2"):
            assert torch.equal(spoilt[name][others], clean[name][others]), name
        for name in ("dw1", "dw2") if where == "x" else ("dw1",):
            assert bool(torch.isnan(spoilt[name][expert]).all()), name


def test_it_is_a_recipe_of_its_own():
    config = SonicMoEConfig(engine="hopper", fp8_mode="perf", recipe=STEADY)
    assert config.resolve().recipe == STEADY
