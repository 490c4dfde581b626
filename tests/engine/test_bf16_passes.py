"""The passes of the BF16 engine without a GPU: its real host code over GEMMs computed on the host, of
quack-kernels and for Hopper, against the reference engine.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("the host's GEMMs are PyTorch's", allow_module_level=True)

from engine.bf16_host import QUACK, launches_fixture  # noqa: F401
from engine.fp8_layer import assert_same_bits
from engine.plain_layer import (
    BF16,
    E,
    H,
    I,
    make_case,
)
from engine.plain_layer import run as run_on
from oracle.case import Case as OracleCase
from oracle.engines import chosen_on_host
from oracle.faces import ON_HOST, normal
from oracle.faces import run as run_oracle
from oracle.golden import scene_of

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.layouts import WeightLayout

OURS = Bf16Engine()


def run(case):
    return run_on(case, OURS)


@pytest.mark.parametrize(
    "settings",
    [{"recompute_z": True}, {"frees_stagewise": True}, {"gemm_num_sms": 40}],
    ids=lambda settings: next(iter(settings)),
)
def test_the_same_bits_in_every_mode(settings, launches):
    case = make_case()
    wanted = run(case)
    launches.clear()
    assert_same_bits(run(case.but(**settings)), wanted)
    assert ("up_again" in launches.calls) == settings.get("recompute_z", False)
    assert launches.lent == {settings.get("gemm_num_sms", launches.every)}


def test_without_a_valid_slot_nothing_is_launched(launches):
    case = make_case()
    case.indices.fill_(-1)
    assert all(not bool(tensor.any()) for tensor in run(case).values())
    assert not launches.calls


class TestWgrad:
    @pytest.mark.parametrize("stagewise", [False, True])
    def test_stagewise_memory_frees_y1s_before_dw1(self, stagewise, launches, monkeypatch):
        case = make_case(frees_stagewise=stagewise)
        pending = case.pending(OURS)
        y1s, alive = weakref.ref(pending.y1s), []
        monkeypatch.setattr(launches.of, "wgrad_up", lambda *_: alive.append(y1s() is not None))
        OURS.backward_dw(pending, case.accumulators())
        assert alive == [not stagewise]

    @pytest.mark.parametrize("split_half", [False, True])
    def test_biases_are_summed_for_whoever_asks_and_where_they_lie(self, split_half, launches):
        """As often as asked, without a product and before `backward_dw`, with which they share bits."""
        layout = WeightLayout(split_half=split_half)
        case = replace(make_case(), layout=layout)
        wanted, pending = run(case), case.pending(OURS)
        launches.clear()
        for _ in range(2):
            db1, db2 = OURS.bias_gradients(pending)
            assert torch.equal(WeightLayout().ordered_b1(db1, pending.split_half), wanted["db1"])
            assert torch.equal(db2, wanted["db2"])
        frozen = GradientPlaces.stacked(None, E, layout)
        alone = GradientTargets(frozen, frozen, biases=(torch.ones(E, 2 * I), None))
        OURS.backward_dw(pending, alone)
        assert not launches.calls and torch.equal(
            alone.biases[0], layout.user_b1(wanted["db1"] + 1)
        )
        with pytest.raises(RuntimeError, match="released by an earlier backward_dw"):
            OURS.bias_gradients(pending)

    @pytest.mark.parametrize("stagewise", [False, True])
    def test_stagewise_memory_frees_z_before_dx(self, stagewise, launches, monkeypatch):
        case, alive = make_case(frees_stagewise=stagewise), []
        weights, _, saved = case.forward(OURS)
        z = weakref.ref(saved.z)
        monkeypatch.setattr(launches.of, launches.dgrad, lambda *_: alive.append(z() is not None))
        OURS.backward_dx(case.dout, saved, weights)
        assert alive == [not stagewise] and (saved.x is None) == stagewise

    @pytest.mark.parametrize("frozen", ["up", "down", "both"])
    def test_a_frozen_projection_is_left_out(self, frozen, launches):
        case, layout = make_case(bias=False), WeightLayout()
        wanted = run(case)
        up = None if frozen in ("up", "both") else torch.zeros(E, 2 * I, H)
        down = None if frozen in ("down", "both") else torch.zeros(E, H, I)
        targets = GradientTargets(
            GradientPlaces.stacked(up, E, layout), GradientPlaces.stacked(down, E, layout)
        )
        pending = case.pending(OURS)
        launches.clear()
        OURS.backward_dw(pending, targets)
        assert up is None or torch.equal(up, wanted["dw1"])
        assert down is None or torch.equal(down, wanted["dw2"])
        launched = [name in launches.calls for name in ("wgrad_up", "wgrad_down")]
        assert launched == [up is not None, down is not None]


def test_memory_for_adapters_that_a_layer_has_not_is_not_read(launches):
    """A compiled graph passes it on in any case."""
    case, found = make_case(), []
    for projected in (None, torch.empty((0,), dtype=BF16)):
        weights, _, saved = case.forward(OURS)
        saved.projected = projected
        found.append(OURS.backward_dx(case.dout, saved, weights)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("launches", [QUACK], indirect=True)
def test_the_log_says_once_that_adapters_are_no_kernels(launches, caplog, monkeypatch):
    """Plain grouped GEMMs compute them beside the engine's."""
    chosen_on_host(monkeypatch)
    case = normal(OracleCase.parse("face=stacked dtype=bfloat16 adapters=both"), "bf16" + ON_HOST)
    for _ in range(2):
        run_oracle(case, scene_of(case), "bf16" + ON_HOST)
    words = "engine bf16 computes low-rank adapters by PyTorch's grouped GEMMs, beside its own"
    assert [record.getMessage() for record in caplog.records].count(words) == 1
