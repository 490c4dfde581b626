"""Which memory of parameters the BF16 GEMMs cannot add weight gradients to, and why. That they add to the
rest where it lies, tests/oracle has.
"""

from __future__ import annotations

import pytest
from framework import torch

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.blackwell.bf16_gradients import outputs_of
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError
from sonicmoe.kernels.blackwell.quack_gemm import STORED, Stored
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES

E, H, I = 3, 32, 24
N1 = 2 * I
NATIVE, ERNIE = WeightLayout(), WeightLayout(transposed=True, split_half=True)
BF16 = EngineSettings()
PLAIN_WGRAD = EngineSettings(recipe=RECIPES["dx256"], fp8_wgrad=False)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def other_axis(experts, rows, columns):
    """Memory in the other order of a matrix's axes, rows padded."""
    return zeros(experts, columns, rows + 4)[:, :, :rows].transpose(1, 2)


def shapes(layout):
    sizes = ((N1, H), (H, I))
    return [size[::-1] if layout.transposed else size for size in sizes]


def stacked(up, down, layout=NATIVE, down_layout=None):
    experts = int((up if up is not None else down).shape[0])
    of_down = GradientPlaces.stacked(down, experts, down_layout or layout)
    return GradientTargets(GradientPlaces.stacked(up, experts, layout), of_down)


def problem(targets):
    """Of the engine; the Hopper engine without FP8 weight gradients runs the same GEMMs."""
    found = Bf16Engine().problem_of(targets, BF16)
    assert HopperEngine().problem_of(targets, PLAIN_WGRAD) == found
    if found is not None:
        assert "\n" not in found and not targets.adding
        with pytest.raises(ConfigError, match="the BF16 GEMMs cannot add to these parameters: "):
            outputs_of(targets)
    return found


class TestRefused:
    """One sentence with the reason; nothing was added."""

    def test_a_tensor_for_each_expert(self):
        up = GradientPlaces.per_expert([zeros(N1, H) for _ in range(E)], NATIVE)
        down = GradientPlaces.per_expert([zeros(H, I) for _ in range(E)], NATIVE)
        one_up, one_down = (GradientPlaces.stacked(zeros(E, *s), E, NATIVE) for s in shapes(NATIVE))
        words = "-projection gradients have a tensor for each expert, and the BF16 GEMMs add to one"
        assert problem(GradientTargets(up, down)).startswith("up" + words)
        assert problem(GradientTargets(up, one_down)).startswith("up" + words)
        assert problem(GradientTargets(one_up, down)).startswith("down" + words)
        assert problem(GradientTargets(one_up, one_down)) is None

    def test_gate_and_up_columns_apart(self):
        """The whole layer, although its down-projections would do."""
        up, down = (zeros(E, *size) for size in shapes(ERNIE))
        assert problem(stacked(up, down, ERNIE)) == (
            "up-projection gradients hold all gate columns before all up columns and are contiguous "
            "along them, and the BF16 GEMMs write gate and up columns in turns"
        )
        assert problem(stacked(other_axis(E, H, N1), down, ERNIE)) is None
        assert problem(stacked(None, down, ERNIE)) is None


@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.GELU])
def test_a_warm_up_has_every_variant_that_a_destination_asks_for(activation):
    from sonicmoe.kernels.blackwell.quack_gemm import (
        MlpShape,
        all_kernels,
        wgrad_kernel,
    )

    for hidden, inner in ((3072, 1536), (2048, 768), (512, 384), (2880, 2880)):
        shape = MlpShape(hidden, inner, activation, arch="sm_100a")
        planned = set(all_kernels(shape))
        for stored in STORED["wgrad_down"]:
            assert wgrad_kernel("wgrad_down", shape, stored) in planned
        for stored in STORED["wgrad_up"]:
            gated = activation is ActivationType.SWIGLU
            asked = wgrad_kernel("wgrad_up", shape, stored) in planned
            assert asked == (gated or stored is not Stored.HALVES)
