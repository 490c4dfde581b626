"""The engine's border: what is refused and how it is named; settings from a configuration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.moe_golden import (
    assert_same_bits,
    make_problem,
    native_weights,
    run_engine,
    set_up,
)
from framework import IS_PADDLE, tensor, torch

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError, DeviceError, DTypeError, RoutingError, ShapeError
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing

PLAIN = EngineSettings()
FP8 = EngineSettings(recipe=RECIPES["dx256"])
ROWS = EngineSettings(recipe=RECIPES["1x128"], save_z=ZCode.E4M3)
MODES = pytest.mark.parametrize("settings", [PLAIN, FP8, ROWS], ids=["plain", "dx256", "1x128"])


class TestRefusals:
    @pytest.fixture
    def setup(self):
        return set_up(make_problem())

    @pytest.mark.parametrize("shape", [(36, 80), (37, 79), (37,), (37, 80, 1)])
    def test_shape_of_x_and_dout(self, setup, shape):
        bad = tensor(np.zeros(shape), torch.float32)
        with pytest.raises(ShapeError, match=r"x has shape .*\(37, 80\)"):
            replace(setup, x=bad).forward()
        _, saved = setup.forward()
        with pytest.raises(ShapeError, match=r"dout has shape .*\(37, 80\)"):
            setup.engine.backward_dx(bad, saved, setup.weights)

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int32"])
    def test_dtype_of_x_and_dout(self, setup, dtype):
        bad = tensor(np.zeros((37, 80)), torch.float32).to(getattr(torch, dtype))
        with pytest.raises(DTypeError, match=f"x is {dtype}"):
            replace(setup, x=bad).forward()
        _, saved = setup.forward()
        with pytest.raises(DTypeError, match=f"dout is {dtype}"):
            setup.engine.backward_dx(bad, saved, setup.weights)

    def test_no_tensor(self, setup):
        with pytest.raises(TypeError, match="x must be a"):
            replace(setup, x=setup.problem.x).forward()
        _, saved = setup.forward()
        with pytest.raises(TypeError, match="dout must be a"):
            setup.engine.backward_dx(None, saved, setup.weights)

    @pytest.mark.skipif(IS_PADDLE, reason="PyTorch's meta device stands in for another device")
    def test_device(self, setup):
        with pytest.raises(DeviceError, match="routing is on cpu but x is on meta"):
            replace(setup, x=setup.x.to("meta")).forward()

    def test_routing_of_another_expert_count(self, setup):
        routing = build_routing(
            tensor(setup.problem.indices), tensor(setup.problem.probs, torch.float32), 5
        )
        with pytest.raises(RoutingError, match="routing is for 5 experts, the weights hold 4"):
            replace(setup, routing=routing).forward()

    def test_routing_padded_for_another_recipe(self):
        setup = set_up(make_problem(), EngineSettings(recipe=RECIPES["iso256"]))
        routing = build_routing(
            tensor(setup.problem.indices),
            tensor(setup.problem.probs, torch.float32),
            4,
            alignment=128,
        )
        with pytest.raises(
            RoutingError, match="pads experts to 128 rows; the recipe needs a multiple of 256"
        ):
            replace(setup, routing=routing).forward()
        wider = build_routing(
            tensor(setup.problem.indices),
            tensor(setup.problem.probs, torch.float32),
            4,
            alignment=512,
        )
        assert_same_bits(
            replace(setup, routing=wider).run(), setup.run(), names=("out", "dx", "dprobs")
        )

    @pytest.mark.parametrize(
        ("prepared_for", "used_with"), [(PLAIN, FP8), (FP8, PLAIN)], ids=["plain", "fp8"]
    )
    def test_weights_prepared_for_other_settings(self, prepared_for, used_with):
        """Plain weights under a recipe would silently be a different computation."""
        setup = set_up(make_problem(), prepared_for)
        with pytest.raises(DTypeError, match="prepare_weights"):
            replace(setup, settings=used_with).forward()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"w1": (4, 96)}, r"w1 has shape \(4, 96\)"),
            ({"w2": (80, 48)}, r"w2 has shape \(80, 48\)"),
            ({"w2": (4, 81, 48)}, r"w2 has shape .*\(4, 80, 48\)"),
            ({"w2": (3, 80, 48)}, r"w2 has shape .*\(4, 80, 48\)"),
            ({"w1": (4, 95, 80)}, "w1 has 95 rows per expert; swiglu with I=48 needs 96"),
            ({"w1": (4, 48, 80)}, "w1 has 48 rows per expert; swiglu with I=48 needs 96"),
            ({"b1": None}, "both or neither"),
            ({"b2": None}, "both or neither"),
            ({"b1": (4, 95)}, r"b1 has shape \(4, 95\); needed: \(4, 96\)"),
            ({"b2": (4, 1)}, r"b2 has shape \(4, 1\); needed: \(4, 80\)"),
        ],
        ids=str,
    )
    def test_weights(self, change, message):
        shapes = {"w1": (4, 96, 80), "w2": (4, 80, 48), "b1": (4, 96), "b2": (4, 80)} | change
        weights = {
            n: None if s is None else tensor(np.zeros(s), torch.float32) for n, s in shapes.items()
        }
        with pytest.raises(ShapeError, match=message):
            ReferenceEngine().prepare_weights(**weights, settings=PLAIN)

    def test_gated_weights_under_an_ungated_activation(self):
        w1, w2, _, _ = native_weights(make_problem())
        with pytest.raises(ShapeError, match="relu with I=48 needs 48"):
            ReferenceEngine().prepare_weights(
                tensor(w1, torch.float32),
                tensor(w2, torch.float32),
                None,
                None,
                EngineSettings(ActivationType.RELU),
            )


class TestSettings:
    def resolved(self, **fields):
        return EngineSettings.from_config(SonicMoEConfig(**fields).resolve(), ActivationType.GEGLU)

    def test_follow_the_configuration(self):
        settings = self.resolved(
            fp8_mode="perf", fp8_wgrad=False, save_z="e4m3", recompute_z=True, recipe="iso256-pow2"
        )
        assert settings == EngineSettings(
            ActivationType.GEGLU, RECIPES["iso256-pow2"], False, ZCode.E4M3, True
        )
        assert settings.row_alignment == 256

    def test_without_fp8_there_is_no_recipe(self):
        settings = self.resolved(recipe="wide512")
        assert settings.recipe is None
        assert settings.row_alignment == 128

    def test_fp8_mem_frees_stagewise(self):
        assert self.resolved(fp8_mode="mem").frees_stagewise
        assert self.resolved(stagewise_memory=True).frees_stagewise
        assert not self.resolved(fp8_mode="perf").frees_stagewise

    def test_iso_weight_needs_isotropic_weights(self):
        assert self.resolved(fp8_mode="perf", recipe="dx256", iso_weight=True).iso_weight
        with pytest.raises(ConfigError, match=r"iso_weight needs.*isotropic.*1x128"):
            self.resolved(fp8_mode="perf", recipe="1x128", iso_weight=True)

    def test_iso_weight_changes_no_bit(self):
        problem = make_problem()
        assert_same_bits(
            run_engine(problem, replace(FP8, iso_weight=True)), run_engine(problem, FP8)
        )
