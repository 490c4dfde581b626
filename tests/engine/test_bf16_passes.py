"""The passes of the BF16 engine without a GPU: its real host code over GEMMs computed on the host,
against the reference engine.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("the host's GEMMs are PyTorch's", allow_module_level=True)

from engine.host_bf16 import HostGemms, HostRows

from sonicmoe.diagnostics.stages import listening
from sonicmoe.engine import bf16
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gpu import Gpu
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.targets import ParameterTargets, WeightTarget
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.errors import ConfigError
from sonicmoe.layouts import WeightLayout
from sonicmoe.routing.build import build_routing

T, H, I, E, K = 150, 72, 40, 4, 2
SWIGLU, GELU = ActivationType.SWIGLU, ActivationType.GELU
OURS, REFERENCE = Bf16Engine(), ReferenceEngine()


@pytest.fixture(autouse=True)
def gemms(monkeypatch):
    """Launches reach the host's GEMMs, of which there is one object per shape and cap."""
    made = {}
    monkeypatch.setattr(bf16, "gpu_of", lambda device: Gpu("sm_90a", 132))
    monkeypatch.setattr(bf16, "launch_scope", lambda tensor: nullcontext())
    monkeypatch.setattr(bf16, "ExpertRows", HostRows)
    monkeypatch.setattr(
        bf16,
        "grouped_gemms",
        lambda shape, lent: made.setdefault((shape, lent), HostGemms(shape)),
    )
    monkeypatch.setattr(Bf16Engine, "_runs_beside", lambda self, weight: True)
    return made


@dataclass
class Case:
    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    weights: tuple
    activation: ActivationType

    def run(self, engine=OURS, **settings):
        chosen = EngineSettings(self.activation, **settings)
        weights = engine.prepare_weights(*self.weights, chosen)
        routing = build_routing(self.indices, self.probs, E)
        out, saved = engine.forward(self.x, routing, weights, chosen)
        n1, biased = int(self.weights[0].shape[1]), self.weights[2] is not None
        sums = NativeBuffer.zeros(E, n1, H, I, biased, "cpu")
        dx, dprobs = engine.backward(self.dout, saved, weights, sums)
        return {"out": out, "dx": dx, "dprobs": dprobs, **sums.named()}

    def pending(self, **settings):
        chosen = EngineSettings(self.activation, **settings)
        weights = OURS.prepare_weights(*self.weights, chosen)
        routing = build_routing(self.indices, self.probs, E)
        _, saved = OURS.forward(self.x, routing, weights, chosen)
        return OURS.backward_dx(self.dout, saved, weights)[2]


def make_case(activation=SWIGLU, *, bias=True, dtype=torch.bfloat16):
    """Expert 1 has no token, expert 3 has one; both sentinels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator) * scale

    first = torch.rand((T, 1), generator=generator) < 0.9
    second = torch.rand((T, 1), generator=generator) < 0.3
    indices = torch.cat([torch.where(first, 0, -1), torch.where(second, 2, E)], 1)
    indices[7, 1] = 3
    n1 = I * (2 if is_glu(activation) else 1)
    weights = (
        normal(E, n1, H, scale=2 * H**-0.5).to(dtype),
        normal(E, H, I, scale=I**-0.5).to(dtype),
        normal(E, n1, scale=0.3) if bias else None,
        normal(E, H, scale=0.3) if bias else None,
    )
    probs = torch.rand((T, K), generator=generator) + 0.05
    x, dout = normal(T, H).to(dtype), normal(T, H).to(dtype)
    return Case(x, dout, indices, probs, weights, activation)


def assert_same_bits(actual, wanted):
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=lambda a: a.value)
def test_equals_the_reference_engine(activation, bias, dtype):
    case = make_case(activation, bias=bias, dtype=dtype)
    actual, wanted = case.run(), case.run(REFERENCE)
    assert actual.keys() == wanted.keys()
    for name, got in actual.items():
        one, other = got.double(), wanted[name].double()
        assert one.shape == other.shape and bool(torch.isfinite(one).all()), name
        # Sums of another order move single roundings; db1 sums dz as it is stored, rounded.
        bound = 3e-3 if name == "db1" else 3e-4
        assert float((one - other).norm() / other.norm()) < bound, name


@pytest.mark.parametrize(
    "settings",
    [{"recompute_z": True}, {"frees_stagewise": True}, {"gemm_num_sms": 40}],
    ids=lambda settings: next(iter(settings)),
)
def test_the_same_bits_in_every_mode(settings, gemms):
    case = make_case()
    wanted = case.run()
    gemms.clear()
    assert_same_bits(case.run(**settings), wanted)
    calls = [call for made in gemms.values() for call in made.calls]
    assert ("up_again" in calls) == settings.get("recompute_z", False)
    assert {lent for _, lent in gemms} == {settings.get("gemm_num_sms", 132)}


def test_inference_writes_no_z(gemms):
    case, settings = make_case(), EngineSettings()
    wanted = case.run()["out"]
    gemms.clear()
    weights = OURS.prepare_weights(*case.weights, settings)
    routing = build_routing(case.indices, case.probs, E)
    out, saved = OURS.forward(case.x, routing, weights, settings, save=False)
    (made,) = gemms.values()
    assert saved is None and torch.equal(out, wanted) and made.calls == ["up_only", "down"]


def test_without_a_valid_slot_nothing_is_launched(gemms):
    case = make_case()
    case.indices.fill_(-1)
    assert all(not bool(tensor.any()) for tensor in case.run().values())
    assert not gemms


def test_listeners_see_every_stage_once():
    seen, case = [], make_case()
    with listening(lambda name, value: seen.append(name) or value):
        case.run()
    assert seen == ["z", "y1", "y2", "out", "dz", "y1s", "dx_rows", "dx", "ds"]


class TestWgrad:
    def test_kernels_are_loaded_before_the_first_addition(self, gemms):
        case = make_case()
        pending = case.pending()
        gemms.clear()
        OURS.backward_dw(pending, NativeBuffer.zeros(E, 2 * I, H, I, True, "cpu"))
        (made,) = gemms.values()
        assert made.calls == ["load wgrad_down", "load wgrad_up", "wgrad_down", "wgrad_up"]
        assert pending.x is pending.dout is pending.dz is pending.y1s is None

    def test_operands_that_were_released(self):
        case = make_case()
        pending, sums = case.pending(), NativeBuffer.zeros(E, 2 * I, H, I, True, "cpu")
        OURS.backward_dw(pending, sums)
        with pytest.raises(RuntimeError, match="released by an earlier backward_dw"):
            OURS.backward_dw(pending, sums)

    @pytest.mark.parametrize("stagewise", [False, True])
    def test_stagewise_memory_frees_y1s_before_dw1(self, stagewise, monkeypatch):
        pending = make_case().pending(frees_stagewise=stagewise)
        y1s, alive = weakref.ref(pending.y1s), []
        monkeypatch.setattr(HostGemms, "wgrad_up", lambda *_: alive.append(y1s() is not None))
        OURS.backward_dw(pending, NativeBuffer.zeros(E, 2 * I, H, I, True, "cpu"))
        assert alive == [not stagewise]

    @pytest.mark.parametrize("stagewise", [False, True])
    def test_stagewise_memory_frees_z_before_dx(self, stagewise, monkeypatch):
        case, alive = make_case(), []
        settings = EngineSettings(frees_stagewise=stagewise)
        weights = OURS.prepare_weights(*case.weights, settings)
        routing = build_routing(case.indices, case.probs, E)
        _, saved = OURS.forward(case.x, routing, weights, settings)
        z = weakref.ref(saved.z)
        monkeypatch.setattr(HostGemms, "dgrad", lambda *_: alive.append(z() is not None))
        OURS.backward_dx(case.dout, saved, weights)
        assert alive == [not stagewise] and (saved.x is None) == stagewise

    @pytest.mark.parametrize("frozen", ["up", "down", "both"])
    def test_a_frozen_projection_is_left_out(self, frozen, gemms):
        case, layout = make_case(bias=False), WeightLayout()
        wanted = case.run()
        up = None if frozen in ("up", "both") else torch.zeros(E, 2 * I, H)
        down = None if frozen in ("down", "both") else torch.zeros(E, H, I)
        targets = ParameterTargets(
            WeightTarget.stacked(up, E, layout), WeightTarget.stacked(down, E, layout)
        )
        pending = case.pending()
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
        pending = case.pending()
        with pytest.raises(ConfigError, match="the BF16 GEMMs cannot add to these parameters"):
            OURS.backward_dw(pending, ParameterTargets(*each))
        assert None not in (pending.x, pending.dout, pending.dz, pending.y1s)
