"""The passes of the BF16 engine without a GPU: its real host code over GEMMs computed on the host, of
quack-kernels and for Hopper. tests/oracle compares their numbers with the reference engine's.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("the host's GEMMs are PyTorch's", allow_module_level=True)

from engine.bf16_host import QUACK, launches_fixture  # noqa: F401
from engine.fp8_layer import PLAIN, Case, E, assert_same_bits
from oracle.case import Case as OracleCase
from oracle.engines import chosen_on_host
from oracle.faces import ON_HOST, normal
from oracle.faces import run as run_oracle
from oracle.golden import scene_of

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.layouts import NATIVE

OURS = Bf16Engine()
SIZES = 150, 72, 40  # no tile divides these
stagewise = pytest.mark.parametrize("stagewise", [False, True])


def test_a_part_of_the_gpu_is_lent(launches):
    case = Case(*SIZES, biased=True)
    for multiprocessors in (0, 40):
        launches.clear()
        case.run(OURS, replace(PLAIN, gemm_num_sms=multiprocessors))
        assert launches.lent == {multiprocessors or launches.every}


def test_a_recomputed_z_is_not_kept(launches):
    case, settings = Case(*SIZES), replace(PLAIN, recompute_z=True)
    assert case.forward(OURS, settings)[2].z is None
    case.run(OURS, settings)
    assert "up_again" in launches.calls


@stagewise
def test_stagewise_memory_is_freed_before_the_next_product(stagewise, launches, monkeypatch):
    """z before dx, and y1s before dw1."""
    case, settings, alive = Case(*SIZES), replace(PLAIN, frees_stagewise=stagewise), []
    weights, _, saved = case.forward(OURS, settings)
    z, x = weakref.ref(saved.z), saved.x
    monkeypatch.setattr(launches.of, launches.dgrad, lambda *_: alive.append(z() is not None))
    *_, pending = OURS.backward_dx(case.dout, saved, weights)
    assert x is not None and (saved.x is None) == stagewise
    y1s = weakref.ref(pending.y1s)
    monkeypatch.setattr(launches.of, "wgrad_up", lambda *_: alive.append(y1s() is not None))
    OURS.backward_dw(pending, case.accumulators())
    assert alive == [not stagewise] * 2
    with pytest.raises(RuntimeError, match="released by an earlier backward_dw"):
        OURS.bias_gradients(pending)


@pytest.mark.parametrize("frozen", [("up",), ("down",), ("up", "down")], ids="+".join)
def test_a_frozen_projection_is_left_out(frozen, launches):
    case = Case(*SIZES)
    wanted, targets = case.run(OURS), case.targets(NATIVE, stacked=True)
    for side in frozen:
        setattr(targets, side, GradientPlaces.stacked(None, E, NATIVE))
    pending = case.pending(OURS)
    launches.clear()
    OURS.backward_dw(pending, targets)
    for side, name in (("up", "dw1"), ("down", "dw2")):
        assert (f"wgrad_{side}" in launches.calls) == (side not in frozen)
        assert side in frozen or torch.equal(targets.sums(name), wanted[name])


def test_memory_for_adapters_that_a_layer_has_not_is_not_read(launches):
    """A compiled graph passes it on in any case."""
    case, found = Case(*SIZES), []
    for projected in (None, torch.empty((0,), dtype=torch.bfloat16)):
        weights, _, saved = case.forward(OURS)
        saved.projected = projected
        found.append({"dx": OURS.backward_dx(case.dout, saved, weights)[0]})
    assert_same_bits(*found)


@pytest.mark.parametrize("launches", [QUACK], indirect=True)
def test_the_log_says_once_that_adapters_are_no_kernels(launches, caplog, monkeypatch):
    """Plain grouped GEMMs compute them beside the engine's."""
    chosen_on_host(monkeypatch)
    case = normal(OracleCase.parse("face=stacked dtype=bfloat16 adapters=both"), "bf16" + ON_HOST)
    for _ in range(2):
        run_oracle(case, scene_of(case), "bf16" + ON_HOST)
    words = "engine bf16 computes low-rank adapters by PyTorch's grouped GEMMs, beside its own"
    assert [record.getMessage() for record in caplog.records].count(words) == 1
