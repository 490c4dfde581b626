"""The Hopper engine end to end without a GPU: its real host code, native passes included, over
kernels computed on the host.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("launch arguments are read through PyTorch", allow_module_level=True)

from engine.fp8_layer import E, assert_same_bits, sums_of
from engine.hopper_host import (  # noqa: F401
    FP8,
    MODES,
    OURS,
    PER_EXPERT,
    REFERENCE,
    Case,
    H,
    I,
    T,
    host_passes,
    native_fixture,
    parameter_targets,
)
from kernels.needs import NVCC
from passes import backward

from sonicmoe.engine import hopper_layer
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.hopper_layer import HopperLayer
from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters, LowRank
from sonicmoe.engine.settings import GradientMode
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import ZCode
from sonicmoe.observe import listening
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.reference import dequantize

pytestmark = NVCC


@pytest.mark.parametrize("z", (ZCode.ADAPTIVE, ZCode.BF16), ids=str)
def test_a_donated_z_is_freed_by_the_backward(z):
    """Whoever holds the tensors; the step has the bits of one that keeps it."""
    case, settings = Case(), replace(FP8, save_z=z)
    wanted = case.run(OURS, settings)
    weights, _, saved = case.forward(OURS, settings)
    saved.donated, held = True, saved.z
    parts = (held.bytes, held.scale_inv) if isinstance(held, BlockScaledTensor) else (held,)
    writes = [part._version for part in parts]
    dx, dprobs, _ = OURS.backward_dx(case.dout, saved, weights)
    assert_same_bits({"dx": dx, "dprobs": dprobs}, wanted)
    assert all(part.untyped_storage().nbytes() == 0 for part in parts) and saved.z is None
    # Autograd, which has saved it, refuses to read it again.
    assert all(part._version > then for part, then in zip(parts, writes, strict=True))


def test_a_donated_z_in_a_larger_buffer_stays():
    """Where hooks of saved tensors, as offloading has them, bring tensors back side by side."""
    case = Case()
    weights, _, saved = case.forward(OURS, replace(FP8, save_z=ZCode.BF16))
    buffer = torch.stack([saved.z, saved.z])
    saved.donated, saved.z = True, buffer[0]
    OURS.backward_dx(case.dout, saved, weights)
    one, other = buffer.view(torch.int16)  # bits, because rows behind the last one may hold NaN
    assert torch.equal(one, other)


@pytest.mark.parametrize("engine", [OURS, REFERENCE], ids=lambda engine: engine.name)
def test_biases_are_summed_by_the_backward_to_the_tokens(engine):
    """For whoever asks, as often as asked; where nobody will, not at all. The rest has the same bits."""
    case, settings = Case(seed=4, biased=True), FP8
    wanted = case.run(engine, settings)
    for asked in (True, False):
        weights, _, saved = case.forward(engine, settings)
        saved.wants_biases = asked
        dx, dprobs, pending = engine.backward_dx(case.dout, saved, weights)
        found = {"dx": dx, "dprobs": dprobs}
        for _ in range(2 if asked else 0):
            found |= dict(zip(("db1", "db2"), engine.bias_gradients(pending), strict=True))
            assert_same_bits(found, wanted)
        assert (pending.biases is not None) == asked
        plain = parameter_targets(PER_EXPERT)
        engine.backward_dw(pending, plain)
        assert_same_bits(sums_of(plain), wanted)


def test_memory_for_a_fresh_dw2_is_taken_when_that_of_dz_is_free():
    case, targets = Case(seed=9), parameter_targets(PER_EXPERT, mode=GradientMode.FRESH)
    wanted, down = case.run(OURS, FP8), targets.down
    weights, _, saved = case.forward(OURS, FP8)
    *_, pending = OURS.backward_dx(case.dout, saved, weights)
    dz, held = weakref.ref(pending.dz), []
    targets.down = GradientPlaces.per_expert([None] * E, PER_EXPERT)
    targets.make_down = lambda: held.append(dz()) or down
    OURS.backward_dw(pending, targets)
    assert held == [None]
    assert_same_bits(sums_of(targets), wanted)


def test_frozen_experts_have_no_memory():
    case, targets = Case(seed=10), parameter_targets(PER_EXPERT, frozen=(0, 2))
    got, wanted = case.run(OURS, FP8, targets=targets), case.run(OURS, FP8)
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name][[1, 3]], wanted[name][[1, 3]])
        assert not got[name][[0, 2]].any() and wanted[name][0].any()
    frozen = GradientPlaces.per_expert([None] * E, PER_EXPERT)
    half_frozen = GradientTargets(frozen, parameter_targets(PER_EXPERT).down)
    assert torch.equal(case.run(OURS, FP8, targets=half_frozen)["dw2"], wanted["dw2"])


def test_without_weight_gradients_z_goes_before_the_rows_of_dx(monkeypatch):
    """And nobody writes operands of wgrad."""
    case, settings, memory = Case(seed=4), FP8, []
    wanted = case.run(OURS, settings)
    weights, _, saved = case.forward(OURS, settings)
    z = weakref.ref(saved.z)
    empty_dx = HopperLayer.empty_dx
    monkeypatch.setattr(hopper_layer, "LONG_Z", 1)
    monkeypatch.setattr(HopperLayer, "empty_dx", lambda *a: memory.append(z()) or empty_dx(*a))
    saved.donated, saved.wants_weights = True, False
    dx, dprobs, pending = OURS.backward_dx(case.dout, saved, weights)
    assert memory == [None] and pending.dz is None
    assert_same_bits({"dx": dx, "dprobs": dprobs}, wanted)


def test_operands_of_adapters_gradients_go_before_the_rows_of_dx(monkeypatch):
    case, held = Case(), []
    sizes = (16, H), (2 * I, 16), (16, I), (H, 16)
    up_a, up_b, down_a, down_b = (torch.randn(E, *size).bfloat16() for size in sizes)

    def run(donated):
        adapters = Adapters(LowRank(up_a, up_b, 0.5), LowRank(down_a, down_b, 0.5))
        prepared = OURS.prepare_weights(case.w1, case.w2, None, None, FP8)
        weights = prepared.with_adapters(adapters)
        out, saved = OURS.forward(case.x, case.routing, weights, FP8)
        # The backward has records of its own, as a bridge makes them.
        weights = prepared.with_adapters(adapters._replace())
        saved.wants_weights, saved.donated = False, donated
        dx, dprobs, pending = OURS.backward_dx(case.dout, saved, weights)
        factors = dict(zip(NAMES_OF_FACTORS, pending.adapters(), strict=True))
        return {"out": out, "dx": dx, "dprobs": dprobs} | factors

    wanted = run(False)
    empty_operands, empty_dx = HopperLayer.empty_operands, HopperLayer.empty_dx

    def operands(*given):
        held.append(weakref.ref((made := empty_operands(*given))[1]))
        return made

    monkeypatch.setattr(hopper_layer, "LONG_Z", 1)
    monkeypatch.setattr(HopperLayer, "empty_operands", operands)
    monkeypatch.setattr(HopperLayer, "empty_dx", lambda *a: held.append(held[0]()) or empty_dx(*a))
    assert_same_bits(run(True), wanted)
    assert held[1:] == [None]


def test_inference_keeps_nothing():
    case = Case(seed=3)
    _, out, saved = case.forward(OURS, FP8, save=False)
    assert saved is None and torch.equal(out, case.run(OURS, FP8)["out"])


SHOWN = {
    "x_fp8", "z", "y1", "y2", "out", "dout_fp8", "dz_fp8", "ds", "dz", "y1s", "dx_rows", "dx", "wgrad_x", "wgrad_dout",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["default", "stagewise", "recompute_z"])
def test_every_stage_is_shown(mode):
    """As the reference engine computes it, and without changing a bit."""
    case, settings = Case(seed=5), replace(FP8, **MODES[mode])
    quiet, seen, wanted = case.run(OURS, settings), {}, {}

    def keep(where):
        def listener(name, value):
            quantised = isinstance(value, BlockScaledTensor)
            where[name] = dequantize(value) if quantised else value.clone()
            return value

        return listener

    with listening(keep(seen)):
        shown = case.run(OURS, settings)
    with listening(keep(wanted)):
        case.run(REFERENCE, FP8)
    assert_same_bits(shown, quiet)
    assert set(seen) == SHOWN
    for name, shown in seen.items():
        golden = wanted["z_saved" if name == "z" else name]
        assert shown.shape == golden.shape, name
        rows = int(case.routing.padded_offsets[-1]) if len(shown) == case.routing.num_rows else T
        got, exact = shown[:rows].float(), golden[:rows].float()
        bound = 0.06 if name in ("dz", "y1s") else 1e-3  # these two are shown before quantisation
        assert float((got - exact).norm() / exact.norm()) < bound, name


@pytest.mark.parametrize(
    ("stage", "reaches"),
    [
        ("x_fp8", {"out", "dx", "dprobs", "dw1", "dw2"}), ("z", {"dx", "dprobs", "dw1", "dw2"}), ("y1", {"out"}), ("y2", {"out"}),
        ("dout_fp8", {"dx", "dprobs", "dw1"}), ("dz_fp8", {"dx"}), ("dz", {"dw1"}), ("y1s", {"dw2"}), ("dx_rows", {"dx"}),
        ("wgrad_x", {"dw1"}), ("wgrad_dout", {"dw2"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("mode", ["default", "everything"])
def test_what_a_listener_plants_flows_on(mode, stage, reaches):
    """A fault planted in a stage reaches what is computed from it and nothing else."""
    case, settings = Case(seed=6), replace(FP8, **MODES[mode])

    def plant(name, value):
        if name != stage:
            return value
        if not isinstance(value, BlockScaledTensor):
            return value * 2
        if mode == "default":
            return replace(value, codes=value.codes.clone(), scale_inv=value.scale_inv * 2)
        return replace(
            value, codes=torch.zeros_like(value.codes.view(torch.uint8)).view(value.codes.dtype)
        )

    wanted = case.run(OURS, settings)
    with listening(plant):
        got = case.run(OURS, settings)
    assert {name for name in wanted if not torch.equal(got[name], wanted[name])} == reaches


def test_tokens_that_moved_off_a_16_byte_address_since_forward():
    """As a hook on saved tensors, or a compiled graph, may hand them back."""
    case = Case(seed=7)
    wanted = case.run(OURS, FP8)
    for mode in ("default", "everything"):
        settings = replace(FP8, **MODES[mode])
        weights, out, saved = case.forward(OURS, settings)
        moved = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].reshape(T, H).copy_(case.x)
        assert moved.data_ptr() % 16
        saved.x, sums = moved, case.accumulators()
        dx, dprobs = backward(OURS, case.dout, saved, weights, sums)
        assert_same_bits({"out": out, "dx": dx, "dprobs": dprobs, **sums.named()}, wanted)
