"""`expert_mlp` over engine `bf16` on Hopper, whose GEMMs are computed on the host; and the memory that a
backward takes. engine/test_oracle_on_host.py has all numbers.
"""

from __future__ import annotations

import pytest
import torch
from engine.bf16_host import HOPPER, launches_fixture  # noqa: F401
from engine.host_hopper_gemms import HopperGemms
from oracle.case import Case
from oracle.faces import LAYERS, Call
from oracle.golden import scene_of

from sonicmoe.engine import bf16_sm90
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.bf16_sm90 import Bf16Layer
from sonicmoe.engine.interface import GradientMode, GradientTargets
from sonicmoe.engine.select import EngineChoice
from sonicmoe.layer import plan

pytestmark = pytest.mark.parametrize("launches", [HOPPER], indirect=True)


@pytest.fixture(autouse=True)
def _chosen(launches, monkeypatch):
    """The engine of every call, whatever the configuration says."""
    chosen = EngineChoice(Bf16Engine(), "a test")
    monkeypatch.setattr(plan, "ready_engine", lambda *_: chosen)


def forward_of(line):
    """A call of `expert_mlp`, and its leaves."""
    case = Case.parse(f"face=stacked dtype=bfloat16 routing=sentinels sizes=50x64x40x4x2 {line}")
    layer = LAYERS[case.face](case, scene_of(case), "reference")
    call = Call(layer, layer.scene)
    return call, (call.leaf, call.probs, *layer.weights, *layer.biases)


def test_dz_takes_the_memory_of_z_where_no_backward_follows(monkeypatch):
    """With `retain_graph` z stays for the next one, which gives the same bits. Else it is free when
    memory for dw2 is taken, although autograd holds it.
    """
    shared, free, modes = [], [], []
    add, dgated, take_down = Bf16Engine.backward_dw, Bf16Layer.dgated, GradientTargets.take_down

    def added(self, pending, targets):
        modes.append(targets.mode)
        add(self, pending, targets)

    def noted(self, dout, z, operands, *others):
        shared.append(operands[0] is z)
        free.append(z.untyped_storage())
        return dgated(self, dout, z, operands, *others)

    def taken(targets):
        free[-1] = free[-1].nbytes() == 0
        take_down(targets)

    monkeypatch.setattr(Bf16Engine, "backward_dw", added)
    monkeypatch.setattr(GradientTargets, "take_down", taken)
    monkeypatch.setattr(Bf16Layer, "dgated", noted)
    call, leaves = forward_of("arrangement=fused bias=True")
    first = torch.autograd.grad(call.value, leaves, call.gradient, retain_graph=True)
    second = torch.autograd.grad(call.value, leaves, call.gradient)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(call.value, leaves, call.gradient)
    # As autograd takes them: no accumulators.
    assert modes == [GradientMode.FRESH] * 2
    assert shared == free == [False, True]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_backward_that_failed_behind_dgated_is_not_repeated(monkeypatch):
    """dz lies where z was. Running out of memory before that loses nothing."""
    failing, gemm, memory = [], HopperGemms.grouped_gemm, bf16_sm90.empty

    def work_or_fail(work):
        def replaced(*arguments):
            if failing and failing[0] is work:
                raise torch.OutOfMemoryError(failing.pop())
            return work(*arguments)

        return replaced

    monkeypatch.setattr(bf16_sm90, "empty", work_or_fail(memory))
    monkeypatch.setattr(HopperGemms, "grouped_gemm", work_or_fail(gemm))
    call, leaves = forward_of("arrangement=native")
    for work in (memory, gemm):
        failing.append(work)
        with pytest.raises(RuntimeError, match="function"):
            call.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        call.backward()
    assert all(leaf.grad is None for leaf in leaves)
