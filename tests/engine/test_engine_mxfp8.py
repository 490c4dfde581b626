"""The MXFP8 engine without a GPU: its real host code and the exact quantisers over GEMMs computed on the
host. test_oracle_on_host.py compares its numbers with the reference engine's.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("the host's GEMMs are PyTorch's", allow_module_level=True)

from engine.fp8_layer import Case
from engine.host_gemms import MxGemms, MxKernels, MxRows

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine import trial
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.blackwell import mx, mxfp8
from sonicmoe.engine.blackwell.mxfp8 import Mxfp8Engine
from sonicmoe.engine.capabilities import MXFP8, missing_package
from sonicmoe.engine.compile_plan import plan, warm_up_plan
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import Workload
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.layouts import NATIVE
from sonicmoe.quant.recipes import RECIPES

MX = EngineSettings(recipe=RECIPES["iso32-pow2"], save_z=ZCode.BF16)
OURS = Mxfp8Engine()
pytestmark = pytest.mark.usefixtures("mx_gemms")
SIZES = 90, 160, 288


@pytest.fixture(name="mx_gemms")
def mx_gemms_fixture(monkeypatch):
    """Launches reach the host's GEMMs; every byte that nobody wrote is a NaN."""
    made = {}

    @contextmanager
    def launches(x, settings, routing):
        key = settings.activation, settings.activation_parameters
        yield made.setdefault(key, MxGemms(*key)), MxRows(routing)

    monkeypatch.setattr(mxfp8, "_launches", launches)
    monkeypatch.setattr(mx, "_kernels", lambda device: MxKernels)
    monkeypatch.setattr(mx.MxWeights, "_update_on_host", MxKernels.update)
    for module in (mxfp8, mx):
        empty = module.empty
        monkeypatch.setattr(module, "empty", lambda *args, empty=empty: empty(*args).fill_(0xFF))
    return made


def test_plain_wgrad_hands_bf16_rows_to_the_bf16_gemms(monkeypatch):
    case, handed = Case(*SIZES), []
    wanted = case.run(OURS, MX)
    monkeypatch.setattr(Bf16Engine, "backward_dw", lambda _, pending, __: handed.append(pending))
    found = case.run(OURS, replace(MX, fp8_wgrad=False))
    (pending,) = handed
    assert pending.dz.dtype == pending.y1s.dtype == torch.bfloat16
    assert torch.equal(pending.x, case.x) and torch.equal(pending.dout, case.dout)
    assert torch.equal(found["dx"], wanted["dx"])


def test_parameters_that_its_gemms_cannot_add_to():
    case = Case(*SIZES)
    per_expert, stacked = (case.targets(NATIVE, stacked=stacked) for stacked in (False, True))
    targets = GradientTargets(per_expert.up, stacked.down)
    assert "the MXFP8 GEMMs add to one for all" in OURS.problem_of(targets, MX)
    with pytest.raises(ConfigError, match="the MXFP8 GEMMs cannot add to these parameters"):
        case.run(OURS, MX, targets=targets)


@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.SITU_GLU])
def test_a_right_engine_passes_its_trial(activation):
    """On a GPU where it never ran it is tried before it runs; the bars leave it room."""
    tried = trial.Problem(Workload(replace(MX, activation=activation), 256, 288), "cpu")
    bars = trial.bars_of(tried.settings)
    found = [trial.judged(OURS, one, wanted, bars) for one, wanted in trial.cases(tried, OURS)]
    names = [result["case"] for result in found]
    assert {"inference", "training"} < {*names}
    assert any("main_grad" in name for name in names)
    for result in found:
        assert result["problem"] is None, result
        for name, (rmse, element) in result["errors"].items():
            assert rmse < 0.7 * bars.rmse and element < 0.7 * bars.element, name


@pytest.mark.skipif(missing_package(MXFP8.jobs(None, "sm_100a")) is not None, reason="needs quack")
def test_warm_up_plans_it_where_it_is_asked_for():
    spec = ModelSpec(E=8, H=2048, I=768, arch="sm_100a")
    own = {"fp8_mode": "perf", "recipe": "iso32-pow2", "save_z": "bf16"}

    def names(**config):
        planned = plan(spec, SonicMoEConfig(**own, **config).resolve())
        assert {job.key().arch for job in planned} == {"sm_100a"}
        return {job.name for job in planned}

    gemms = {f"mxfp8_{name}" for name in ("up", "down", "dgated", "dgrad", "wgrad")}
    assert gemms | {"mx_quantize", "expert_rows"} <= names(engine="mxfp8")
    assert not any(name.startswith("mx") for name in names())
    plain = names(engine="mxfp8", fp8_wgrad=False)
    assert "mxfp8_wgrad" not in plain and "bf16_wgrad" in plain
    whole = warm_up_plan(spec, config=SonicMoEConfig(**own, engine="mxfp8").resolve())
    assert {job.name for job in whole.jobs} >= gemms
