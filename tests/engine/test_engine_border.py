"""What engines make of weights, rows and multiprocessors, without a GPU; settings from a
configuration.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.moe_golden import FP8, PLAIN, assert_same_bits, make_problem, run_engine, set_up
from framework import tensor, torch

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gpu import Gpu
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing
from sonicmoe.weight_source import WeightSource


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bf16_rounds_master_weights_once(monkeypatch, dtype):
    """From where they lie: fp32 becomes bf16, the others stay."""
    made, dtype = [], getattr(torch, dtype)
    monkeypatch.setattr(Bf16Engine, "prepare_weights", lambda _, *given: made.append(given))
    ups, downs = (
        tuple(torch.rand(shape).to(dtype) for _ in range(2)) for shape in ([16, 16], [8, 16])
    )
    Bf16Engine().refresh(
        WeightSource(ups, downs, WeightLayout(transposed=True, split_half=True)), PLAIN
    )
    w1, w2 = made[0][:2]
    wanted = torch.bfloat16 if dtype == torch.float32 else dtype
    assert w1.dtype == w2.dtype == wanted
    first_up_row = ups[0][:, 8].to(wanted)
    assert bool((w1[0, 1].to(torch.float32) == first_up_row.to(torch.float32)).all())


@pytest.mark.parametrize(("wanted", "lent"), [(0, 132), (2, 2), (96, 96), (1000, 132)])
def test_gemms_leave_multiprocessors_to_other_kernels(wanted, lent):
    assert Gpu("sm_90a", 132).lent(EngineSettings(gemm_num_sms=wanted)) == lent


DX256, ISO256 = RECIPES["dx256"], RECIPES["iso256-pow2"]
GEGLU = ActivationType.GEGLU
OF_CONFIGURATIONS = {
    "everything": (
        {"fp8_mode": "perf", "fp8_wgrad": False, "save_z": "e4m3", "recompute_z": True, "recipe": "iso256-pow2"},
        EngineSettings(GEGLU, ISO256, False, ZCode.E4M3, True)),
    "without FP8 there is no recipe": ({"recipe": "wide512"}, EngineSettings(GEGLU)),
    "perf": ({"fp8_mode": "perf"}, EngineSettings(GEGLU, DX256)),
    "mem": ({"fp8_mode": "mem"}, EngineSettings(GEGLU, DX256, frees_stagewise=True)),
    "stagewise": ({"stagewise_memory": True}, EngineSettings(GEGLU, frees_stagewise=True)),
    "iso_weight": ({"fp8_mode": "perf", "iso_weight": True}, EngineSettings(GEGLU, DX256, iso_weight=True)),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), OF_CONFIGURATIONS.values(), ids=OF_CONFIGURATIONS)
def test_settings_follow_the_configuration(fields, wanted):
    found = EngineSettings.from_config(SonicMoEConfig(**fields).resolve(), GEGLU)
    assert found == wanted and found.row_alignment == (256 if wanted.recipe is ISO256 else 128)


def test_iso_weight_needs_isotropic_weights_and_changes_no_bit():
    with pytest.raises(ConfigError, match=r"iso_weight needs.*isotropic.*1x128"):
        config = SonicMoEConfig(fp8_mode="perf", recipe="1x128", iso_weight=True)
        EngineSettings.from_config(config.resolve(), GEGLU)
    problem = make_problem()
    ours = run_engine(problem, replace(FP8, iso_weight=True))
    assert_same_bits(ours, run_engine(problem, FP8))


def test_rows_padded_more_than_the_recipe_needs_change_no_bit():
    setup = set_up(make_problem(), EngineSettings(recipe=ISO256))
    given = tensor(setup.problem.indices), tensor(setup.problem.probs, torch.float32)
    wider = replace(setup, routing=build_routing(*given, 4, alignment=512)).run()
    assert_same_bits(wider, setup.run(), names=("out", "dx", "dprobs"))
