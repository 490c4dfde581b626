"""Which memory of parameters the engines cannot add weight gradients to, and why, in one sentence each; what a
listener sees of the sums. That they add to the rest where it lies, tests/oracle has.
"""

from __future__ import annotations

import re

import pytest
from engine.fp8_layer import parameter_targets
from engine.moe_golden import make_problem, set_up
from framework import numpy, torch

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.blackwell.bf16_gradients import outputs_of
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.errors import ConfigError
from sonicmoe.layouts import NATIVE, WeightLayout
from sonicmoe.observe import listening
from sonicmoe.quant.recipes import RECIPES

ERNIE = WeightLayout(transposed=True, split_half=True)
E, H, I = 3, 32, 64
SIZES = E, 2 * I, H, I


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float32)


def targets_with(ups=(), downs=()):
    """Per expert, with other memory of some: pairs of expert and tensor."""
    held = [[zeros(H, 2 * I) for _ in range(E)], [zeros(I, H) for _ in range(E)]]
    for tensors, changes in zip(held, (ups, downs), strict=True):
        for expert, tensor in changes:
            tensors[expert] = tensor
    return GradientTargets(*(GradientPlaces.per_expert(tensors, ERNIE) for tensors in held))


def stacked(up, down, layout=ERNIE):
    return GradientTargets(*(GradientPlaces.stacked(t, E, layout) for t in (up, down)))


SIZE = H * 2 * I
BUFFER, SHARED = zeros(2 * SIZE), zeros(I, H)
FIRST, ACROSS, BEHIND = (
    BUFFER[at : at + SIZE].reshape([H, 2 * I]) for at in (0, SIZE - 4, SIZE)
)  # fmt: skip
EXPERT_2 = "the gradient memory of expert 2's down-projection .*; needed: "
OF_THE_COPY_ENGINE = {
    "fits": (targets_with(), None),
    "stacked": (stacked(zeros(E, H, 2 * I), zeros(E, I, H)), None),
    # PaddleFleet converts main_grad of weight1 and leaves that of weight2.
    "two kinds of layout": (
        stacked(zeros(E, 2 * I, H), zeros(E, I, H).transpose(1, 2), NATIVE), None),
    "no axis": (targets_with(downs=[(2, zeros(I, 2 * H)[:, ::2])]), f"{EXPERT_2}1 in one axis of its"),
    "stride": (targets_with(downs=[(2, zeros(I, H + 2)[:, :H])]), f"{EXPERT_2}multiples of 16 bytes in"),
    "address": (targets_with(downs=[(2, zeros(I * H + 1)[1:].reshape([I, H]))]), f"{EXPERT_2}a multiple"),
    "stacked strides": (stacked(zeros(E, H, 4 * I)[:, :, ::2], zeros(E, I, H)),
                        "the gradient memory of the up-projections has strides"),
    "overlap": (targets_with(ups=[(0, FIRST), (2, ACROSS)]),
                ".*expert 0's up-projection overlaps .*expert 2's up"),
    "side by side": (targets_with(ups=[(0, FIRST), (2, BEHIND)]), None),
    "one for two": (targets_with(downs=[(0, SHARED), (1, SHARED)]), ".*overlaps"),
    "axes": (targets_with(ups=[(1, zeros(2 * I, H).transpose(0, 1))]),
             "the experts' up-projection gradients are contiguous along different axes$"),
}  # fmt: skip


@pytest.mark.parametrize(("targets", "words"), OF_THE_COPY_ENGINE.values(), ids=OF_THE_COPY_ENGINE)
def test_why_the_copy_engine_cannot_add(targets, words):
    found = targets.copy_engine_problem()
    assert found is None if words is None else re.match(words, found) and "\n" not in found, found


EACH, ONE = (parameter_targets(SIZES, NATIVE, stacked=stacked) for stacked in (False, True))
FUSED, TURNED = (parameter_targets(SIZES, ERNIE, stacked=True, turned=t) for t in (False, True))
SEPARATE = "-projection gradients have a tensor for each expert, and the BF16 GEMMs add to one"
# Of the whole layer, although its down-projections would do.
APART = (
    "up-projection gradients hold all gate columns before all up columns and are contiguous "
    "along them, and the BF16 GEMMs write gate and up columns in turns"
)
OF_BF16 = {
    "a tensor for each expert": (EACH.up, EACH.down, f"up{SEPARATE}"),
    "of up": (EACH.up, ONE.down, f"up{SEPARATE}"),
    "of down": (ONE.up, EACH.down, f"down{SEPARATE}"),
    "one": (ONE.up, ONE.down, None),
    "gate and up columns apart": (FUSED.up, FUSED.down, APART),
    "along H": (TURNED.up, FUSED.down, None),
    "up frozen": (GradientPlaces.stacked(None, E, ERNIE), FUSED.down, None),
}


@pytest.mark.parametrize(("up", "down", "words"), OF_BF16.values(), ids=OF_BF16)
def test_why_the_bf16_gemms_cannot_add(up, down, words):
    """The Hopper engine without FP8 weight gradients runs the same ones. Nothing was added."""
    targets = GradientTargets(up, down)
    found = Bf16Engine().problem_of(targets, EngineSettings())
    plain_wgrad = EngineSettings(recipe=RECIPES["dx256"], fp8_wgrad=False)
    assert HopperEngine().problem_of(targets, plain_wgrad) == found
    assert (found is None) == (words is None)
    if found is not None:
        assert found.startswith(words) and "\n" not in found and not targets.adding
        with pytest.raises(ConfigError, match="the BF16 GEMMs cannot add to these parameters: "):
            outputs_of(targets)


def test_a_listener_sees_the_sums_and_may_replace_them():
    """Of the reference engine, whether they are added to accumulators or to the parameters' memory."""
    setup, seen = set_up(make_problem()), []
    sums = setup.accumulators()
    sizes = *sums.dw1.shape, sums.dw2.shape[2]
    up, down = (parameter_targets(sizes, ERNIE, stacked=stacked) for stacked in (True, False))
    targets = GradientTargets(up.up, down.down)

    def listener(name, value):
        if name not in ("dw1", "dw2"):
            return value
        seen[-1][name] = numpy(value)
        return value * 2

    for held in (sums, targets):
        seen.append({})
        with listening(listener):
            setup.engine.backward_dw(setup.pending(), held)
    for name in ("dw1", "dw2"):
        assert (seen[0][name] == seen[1][name]).all()
        assert (numpy(targets.sums(name)) == 2 * seen[0][name]).all()
