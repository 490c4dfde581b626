"""The engines' border: what each refuses and how it names it, without a GPU; settings from a
configuration.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.moe_golden import (
    FP8,
    MODES,
    PLAIN,
    assert_same_bits,
    make_problem,
    run_engine,
    set_up,
)
from framework import IS_PADDLE, tensor, torch

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gpu import Gpu
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings, EngineWeights
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError, DeviceError, DTypeError, RoutingError, ShapeError
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing
from sonicmoe.weight_source import WeightSource

REFERENCE, BF16, HOPPER = ReferenceEngine(), Bf16Engine(), HopperEngine()
SILU, RELU = (EngineSettings(ActivationType(name)) for name in ("silu", "relu"))
HOPPERS = {"w1": (4, 128, 80), "w2": (4, 80, 64)}
WITH_BIASES = {"b1": (4, 96), "b2": (4, 80)}

# Of weights w1 (4, 96, 80) and w2 (4, 80, 48) without biases; a change is a shape or a dtype.
WEIGHTS = (
    (REFERENCE, PLAIN, {"w1": (4, 96)}, ShapeError, r"w1 has shape \(4, 96\)"),
    (REFERENCE, PLAIN, {"w2": (80, 48)}, ShapeError, r"w2 has shape \(80, 48\)"),
    (REFERENCE, PLAIN, {"w2": (4, 81, 48)}, ShapeError, r"w2 has shape .*\(4, 80, 48\)"),
    (REFERENCE, PLAIN, {"w2": (3, 80, 48)}, ShapeError, r"w2 has shape .*\(4, 80, 48\)"),
    (REFERENCE, PLAIN, {"w1": (4, 95, 80)}, ShapeError,
     "w1 has 95 rows per expert; swiglu with I=48 needs 96"),
    (REFERENCE, RELU, {}, ShapeError, "relu with I=48 needs 48"),
    (REFERENCE, PLAIN, {"b1": (4, 96)}, ShapeError, "both or neither"),
    (REFERENCE, PLAIN, {"b2": (4, 80)}, ShapeError, "both or neither"),
    (REFERENCE, PLAIN, WITH_BIASES | {"b1": (4, 95)}, ShapeError,
     r"b1 has shape \(4, 95\); needed: \(4, 96\)"),
    (REFERENCE, PLAIN, WITH_BIASES | {"b2": (4, 1)}, ShapeError,
     r"b2 has shape \(4, 1\); needed: \(4, 80\)"),
    (BF16, FP8, {}, ConfigError,
     "the bf16 engine cannot compute this: FP8 is on .*, and it quantises nothing"),
    (BF16, PLAIN, {"w1": "float32", "w2": "float32"}, DTypeError,
     r"w1 is float32, w2 is float32; .* one of \['bfloat16', 'float16'\]"),
    (BF16, PLAIN, {"w2": "float16"}, DTypeError, "w1 is bfloat16, w2 is float16"),
    (BF16, PLAIN, {"w1": (4, 40, 80), "w2": (4, 80, 20)}, ShapeError, "H is 80 and I is 20"),
    (BF16, PLAIN, {}, DeviceError, "w1 is on cpu; the bf16 engine needs a GPU of sm_90a"),
    (BF16, SILU, {}, ShapeError, "silu with I=48 needs 48"),
    (HOPPER, PLAIN, HOPPERS, ConfigError, "the hopper engine cannot compute this: FP8 is off"),
    (HOPPER, FP8, {"w1": (4, 128, 136), "w2": (4, 136, 64)}, ShapeError,
     "H is 136 and I is 64, and it needs multiples of 16"),
    (HOPPER, FP8, HOPPERS | {"b1": (4, 128), "b2": (4, 1)}, ShapeError,
     r"b2 has shape \(4, 1\); needed: \(4, 80\)"),
    (HOPPER, FP8, HOPPERS | {"b1": (4, 64), "b2": (4, 80)}, ShapeError, r"b1 has shape \(4, 64\)"),
    (HOPPER, FP8, HOPPERS | {"b2": (4, 80)}, ShapeError, "b1 and b2 must be given both"),
    (HOPPER, FP8, HOPPERS | {"w1": (4, 64, 80)}, ShapeError,
     "w1 has 64 rows per expert; swiglu with I=64 needs 128"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "settings", "changes", "error", "words"),
    WEIGHTS,
    ids=[f"{engine.name}-{number}" for number, (engine, *_) in enumerate(WEIGHTS)],
)
def test_weights_that_an_engine_cannot_take(engine, settings, changes, error, words):
    shapes = {"w1": (4, 96, 80), "w2": (4, 80, 48), "b1": None, "b2": None}
    dtypes = dict.fromkeys(shapes, "bfloat16")
    shapes |= {name: change for name, change in changes.items() if not isinstance(change, str)}
    dtypes |= {name: change for name, change in changes.items() if isinstance(change, str)}
    weights = {
        name: None if shape is None else torch.zeros(shape, dtype=getattr(torch, dtypes[name]))
        for name, shape in shapes.items()
    }
    with pytest.raises(error, match=words):
        engine.prepare_weights(**weights, settings=settings)
    if engine is HOPPER:  # which reads them where they lie
        with pytest.raises(error, match=words):
            engine.refresh(WeightSource.stacked(*weights.values()), settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bf16_rounds_master_weights_once(monkeypatch, dtype):
    """From where they lie: fp32 becomes bf16, the others stay."""
    made, dtype = [], getattr(torch, dtype)
    monkeypatch.setattr(Bf16Engine, "prepare_weights", lambda _, *given: made.append(given))
    ups, downs = (
        tuple(torch.rand(shape).to(dtype) for _ in range(2)) for shape in ([16, 16], [8, 16])
    )
    BF16.refresh(WeightSource(ups, downs, WeightLayout(transposed=True, split_half=True)), PLAIN)
    w1, w2 = made[0][:2]
    wanted = torch.bfloat16 if dtype == torch.float32 else dtype
    assert w1.dtype == w2.dtype == wanted
    first_up_row = ups[0][:, 8].to(wanted)
    assert bool((w1[0, 1].to(torch.float32) == first_up_row.to(torch.float32)).all())


@pytest.mark.parametrize(("wanted", "lent"), [(0, 132), (2, 2), (96, 96), (1000, 132)])
def test_gemms_leave_multiprocessors_to_other_kernels(wanted, lent):
    assert Gpu("sm_90a", 132).lent(EngineSettings(gemm_num_sms=wanted)) == lent


class TestTokens:
    @pytest.fixture
    def setup(self):
        return set_up(make_problem())

    def refused(self, setup, bad, error, words):
        """As x and as dout; `words` has a place for the name."""
        with pytest.raises(error, match=words.format("x")):
            replace(setup, x=bad).forward()
        _, saved = setup.forward()
        with pytest.raises(error, match=words.format("dout")):
            setup.engine.backward_dx(bad, saved, setup.weights)

    @pytest.mark.parametrize("shape", [(36, 80), (37, 79), (37,), (37, 80, 1)])
    def test_shape(self, setup, shape):
        bad = tensor(np.zeros(shape), torch.float32)
        self.refused(setup, bad, ShapeError, r"{} has shape .*\(37, 80\)")

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int32"])
    def test_dtype(self, setup, dtype):
        bad = tensor(np.zeros((37, 80)), torch.float32).to(getattr(torch, dtype))
        self.refused(setup, bad, DTypeError, f"{{}} is {dtype}")

    def test_no_tensor(self, setup):
        self.refused(setup, setup.problem.x, TypeError, "{} must be a")
        self.refused(setup, None, TypeError, "{} must be a")

    @pytest.mark.skipif(IS_PADDLE, reason="PyTorch's meta device stands in for another device")
    def test_device(self, setup):
        with pytest.raises(DeviceError, match="routing is on cpu but x is on meta"):
            replace(setup, x=setup.x.to("meta")).forward()

    def test_another_dtype_than_that_of_bf16s_weights(self):
        w1, w2 = torch.zeros([2, 16, 16]), torch.zeros([2, 16, 8])
        weights = EngineWeights(*(2 * [w1.to(torch.bfloat16), w2.to(torch.bfloat16)]))
        routing = build_routing(torch.zeros([3, 1], dtype=torch.int64), torch.ones([3, 1]), 2)
        with pytest.raises(DTypeError, match="x is float16; the weights are bfloat16"):
            BF16.forward(torch.zeros([3, 16], dtype=torch.float16), routing, weights, PLAIN)


class TestRouting:
    def routed(self, setup, experts=4, alignment=128):
        given = tensor(setup.problem.indices), tensor(setup.problem.probs, torch.float32)
        return replace(setup, routing=build_routing(*given, experts, alignment=alignment))

    def test_of_another_expert_count(self):
        words = "routing is for 5 experts, the weights hold 4"
        with pytest.raises(RoutingError, match=words):
            self.routed(set_up(make_problem()), experts=5).forward()

    def test_padded_for_another_recipe(self):
        setup = set_up(make_problem(), EngineSettings(recipe=RECIPES["iso256"]))
        words = "pads experts to 128 rows; the recipe needs a multiple of 256"
        with pytest.raises(RoutingError, match=words):
            self.routed(setup).forward()
        wider = self.routed(setup, alignment=512).run()
        assert_same_bits(wider, setup.run(), names=("out", "dx", "dprobs"))

    @MODES
    def test_weights_prepared_for_other_settings(self, settings):
        """Plain weights under a recipe would silently be a different computation."""
        setup = set_up(make_problem(), settings)
        others = FP8 if settings.recipe is None else PLAIN
        words = f"weights are .*, the settings have recipe {others.recipe and 'dx256'!r}"
        with pytest.raises(DTypeError, match=words):
            replace(setup, settings=others).forward()


class TestSettings:
    def resolved(self, **fields):
        return EngineSettings.from_config(SonicMoEConfig(**fields).resolve(), ActivationType.GEGLU)

    def test_follow_the_configuration(self):
        settings = self.resolved(
            fp8_mode="perf", fp8_wgrad=False, save_z="e4m3", recompute_z=True, recipe="iso256-pow2"
        )
        recipe = RECIPES["iso256-pow2"]
        wanted = EngineSettings(ActivationType.GEGLU, recipe, False, ZCode.E4M3, True)
        assert settings == wanted and settings.row_alignment == 256

    def test_without_fp8_there_is_no_recipe(self):
        settings = self.resolved(recipe="wide512")
        assert settings.recipe is None and settings.row_alignment == 128

    def test_fp8_mem_frees_stagewise(self):
        assert self.resolved(fp8_mode="mem").frees_stagewise
        assert self.resolved(stagewise_memory=True).frees_stagewise
        assert not self.resolved(fp8_mode="perf").frees_stagewise

    def test_iso_weight_needs_isotropic_weights_and_changes_no_bit(self):
        assert self.resolved(fp8_mode="perf", recipe="dx256", iso_weight=True).iso_weight
        with pytest.raises(ConfigError, match=r"iso_weight needs.*isotropic.*1x128"):
            self.resolved(fp8_mode="perf", recipe="1x128", iso_weight=True)
        problem = make_problem()
        ours = run_engine(problem, replace(FP8, iso_weight=True))
        assert_same_bits(ours, run_engine(problem, FP8))
