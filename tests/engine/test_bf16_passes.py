"""The passes of the BF16 engine without a GPU: its real host code over GEMMs computed on the host,
against the reference engine.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("the host's GEMMs are PyTorch's", allow_module_level=True)

from engine.fp8_layer import assert_same_bits
from engine.host_gemms import Bf16Gemms, Bf16Rows
from engine.plain_layer import (
    BF16,
    FP16,
    SWIGLU,
    E,
    H,
    I,
    assert_close,
    make_case,
)
from engine.plain_layer import run as run_on

from sonicmoe.engine import bf16
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gpu import Gpu
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.targets import ParameterTargets
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError
from sonicmoe.layouts import WeightLayout
from sonicmoe.observe import listening

GELU = ActivationType.GELU
OURS = Bf16Engine()


@pytest.fixture(autouse=True)
def gemms(monkeypatch):
    """Launches reach the host's GEMMs, of which there is one object per shape and cap."""
    made = {}
    monkeypatch.setattr(bf16, "gpu_of", lambda device: Gpu("sm_100a", 132))
    monkeypatch.setattr(bf16, "launch_scope", lambda tensor: nullcontext())
    monkeypatch.setattr(bf16, "ExpertRows", Bf16Rows)
    gemms_of = lambda shape, lent: made.setdefault((shape, lent), Bf16Gemms(shape))  # noqa: E731
    monkeypatch.setattr(bf16, "grouped_gemms", gemms_of)
    monkeypatch.setattr(Bf16Engine, "_runs_beside", lambda self, weight: True)
    return made


def run(case):
    return run_on(case, OURS)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=lambda a: a.value)
def test_equals_the_reference_engine(activation, bias, dtype):
    assert_close(make_case(activation, bias=bias, dtype=dtype), OURS)


@pytest.mark.parametrize(
    "settings",
    [{"recompute_z": True}, {"frees_stagewise": True}, {"gemm_num_sms": 40}],
    ids=lambda settings: next(iter(settings)),
)
def test_the_same_bits_in_every_mode(settings, gemms):
    case = make_case()
    wanted = run(case)
    gemms.clear()
    assert_same_bits(run(case.but(**settings)), wanted)
    calls = [call for made in gemms.values() for call in made.calls]
    assert ("up_again" in calls) == settings.get("recompute_z", False)
    assert {lent for _, lent in gemms} == {settings.get("gemm_num_sms", 132)}


def test_inference_writes_no_z(gemms):
    case = make_case()
    wanted = run(case)["out"]
    gemms.clear()
    _, out, saved = case.forward(OURS, save=False)
    (made,) = gemms.values()
    assert saved is None and torch.equal(out, wanted) and made.calls == ["up_only", "down"]


def test_without_a_valid_slot_nothing_is_launched(gemms):
    case = make_case()
    case.indices.fill_(-1)
    assert all(not bool(tensor.any()) for tensor in run(case).values())
    assert not gemms


def test_listeners_see_every_stage_once():
    seen, case = [], make_case()
    with listening(lambda name, value: seen.append(name) or value):
        run(case)
    assert seen == ["z", "y1", "y2", "out", "dz", "y1s", "dx_rows", "dx", "ds"]


class TestWgrad:
    def test_kernels_are_loaded_before_the_first_addition(self, gemms):
        case = make_case()
        pending = case.pending(OURS)
        gemms.clear()
        OURS.backward_dw(pending, case.accumulators())
        (made,) = gemms.values()
        assert made.calls == ["load wgrad_down", "load wgrad_up", "wgrad_down", "wgrad_up"]
        assert pending.x is pending.dout is pending.dz is pending.y1s is None

    def test_operands_that_were_released(self):
        case = make_case()
        pending, sums = case.pending(OURS), case.accumulators()
        OURS.backward_dw(pending, sums)
        with pytest.raises(RuntimeError, match="released by an earlier backward_dw"):
            OURS.backward_dw(pending, sums)

    @pytest.mark.parametrize("stagewise", [False, True])
    def test_stagewise_memory_frees_y1s_before_dw1(self, stagewise, monkeypatch):
        case = make_case(frees_stagewise=stagewise)
        pending = case.pending(OURS)
        y1s, alive = weakref.ref(pending.y1s), []
        monkeypatch.setattr(Bf16Gemms, "wgrad_up", lambda *_: alive.append(y1s() is not None))
        OURS.backward_dw(pending, case.accumulators())
        assert alive == [not stagewise]

    @pytest.mark.parametrize("stagewise", [False, True])
    def test_stagewise_memory_frees_z_before_dx(self, stagewise, monkeypatch):
        case, alive = make_case(frees_stagewise=stagewise), []
        weights, _, saved = case.forward(OURS)
        z = weakref.ref(saved.z)
        monkeypatch.setattr(Bf16Gemms, "dgrad", lambda *_: alive.append(z() is not None))
        OURS.backward_dx(case.dout, saved, weights)
        assert alive == [not stagewise] and (saved.x is None) == stagewise

    @pytest.mark.parametrize("frozen", ["up", "down", "both"])
    def test_a_frozen_projection_is_left_out(self, frozen, gemms):
        case, layout = make_case(bias=False), WeightLayout()
        wanted = run(case)
        up = None if frozen in ("up", "both") else torch.zeros(E, 2 * I, H)
        down = None if frozen in ("down", "both") else torch.zeros(E, H, I)
        targets = ParameterTargets(
            WeightTarget.stacked(up, E, layout), WeightTarget.stacked(down, E, layout)
        )
        pending = case.pending(OURS)
        gemms.clear()
        OURS.backward_dw(pending, targets)
        assert up is None or torch.equal(up, wanted["dw1"])
        assert down is None or torch.equal(down, wanted["dw2"])
        calls = [call for made in gemms.values() for call in made.calls]
        assert ("wgrad_up" in calls, "wgrad_down" in calls) == (up is not None, down is not None)

    def test_refused_targets_leave_the_operands(self):
        case, layout = make_case(bias=False), WeightLayout()
        each = [WeightTarget.per_expert([torch.zeros(s) for _ in range(E)], layout)
                for s in ((2 * I, H), (H, I))]  # fmt: skip
        pending = case.pending(OURS)
        with pytest.raises(ConfigError, match="the BF16 GEMMs cannot add to these parameters"):
            OURS.backward_dw(pending, ParameterTargets(*each))
        assert None not in (pending.x, pending.dout, pending.dz, pending.y1s)
