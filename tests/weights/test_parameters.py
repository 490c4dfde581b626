"""Both arrangements of the user's weights become one native form and get gradients in their own
layout; others are refused.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from engine.moe_golden import native_order
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from weights.weight_sources import (
    SOURCES,
    SWIGLU,
    expert_modules,
    weight_arrays,
)

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.errors import DTypeError, LayoutError, ShapeError
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.weights.parameters import PerExpertParameters
from sonicmoe.weights.stacked import FusedParameters

PLAIN = EngineSettings()
FP8 = EngineSettings(recipe=RECIPES["dx256"])
each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


class TestModules:
    """Weights are read where modules keep them, and by attribute where they are not there."""

    @staticmethod
    def layer():
        """Experts of the framework's own modules, and the adapter of them."""
        up_gate, down = weight_arrays()
        (_, hidden, width), inner = up_gate.shape, down.shape[1]
        module = (
            sys.modules["paddle"].nn.Layer if IS_PADDLE else torch.nn.Module
        )  # whose `__getattr__` finds parts

        class Linear(module):
            def __init__(self, weight):
                super().__init__()
                self.weight = parameter(np.asarray(weight, np.float32))

        class Member(module):
            def __init__(self, up, down):
                super().__init__()
                self.up_gate_proj, self.down_proj = Linear(up), Linear(down)

        experts = [Member(*pair) for pair in zip(up_gate, down, strict=True)]
        assert width == 2 * inner
        return Linear, experts, PerExpertParameters(experts, len(experts), hidden, inner, SWIGLU)

    def test_replaced_parts_are_seen(self):
        linear, experts, adapter = self.layer()
        fresh = parameter(np.zeros(tuple(experts[1].up_gate_proj.weight.shape), np.float32))
        experts[1].up_gate_proj.weight = fresh
        experts[2].down_proj = linear(np.ones(tuple(experts[2].down_proj.weight.shape)))
        found = adapter.parameters()
        assert found[1] is fresh
        assert found[-1] is experts[2].down_proj.weight and numpy(found[-1]).all()


class TestSources:
    @each_source
    @pytest.mark.parametrize("activation", [SWIGLU, ActivationType.RELU_SQ], ids=lambda a: a.value)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_native_weights(self, make, activation, dtype):
        up_gate, down = weight_arrays(activation=activation)
        source = make(up_gate, down, activation, getattr(torch, dtype))
        w1, w2 = source.native()
        assert (tuple(w1.shape), tuple(w2.shape)) == source.native_shapes()
        rounded = [
            numpy(tensor(a, torch.float32).to(getattr(torch, dtype))) for a in (up_gate, down)
        ]
        order = native_order(up_gate.shape[2], is_glu(activation))
        np.testing.assert_array_equal(numpy(w1), rounded[0].transpose(0, 2, 1)[:, order])
        np.testing.assert_array_equal(numpy(w2), rounded[1].transpose(0, 2, 1))
        assert str(w1.dtype).endswith(dtype)

    def test_none_entries_are_other_ranks_experts(self):
        up_gate, down = weight_arrays()
        a, b, c = expert_modules(up_gate, down)
        source = PerExpertParameters([None, a, None, b, c, None], 3, 16, 12, SWIGLU)
        np.testing.assert_array_equal(numpy(source.native()[1]), down.transpose(0, 2, 1))

    @pytest.mark.parametrize("held", ["list", "modules"])
    def test_replaced_modules_are_seen_and_checked(self, held):
        up_gate, down = weight_arrays()
        modules, others = expert_modules(up_gate, down), expert_modules(up_gate + 1, down + 1)
        given = modules
        if held == "modules":
            nn = sys.modules["paddle"].nn if IS_PADDLE else torch.nn
            given = nn.LayerList() if IS_PADDLE else nn.ModuleList()
            given.extend(TestModules.layer()[1])
        source = PerExpertParameters(given, 3, *up_gate.shape[1:2], down.shape[1], SWIGLU)
        fresh = others[1] if held == "list" else TestModules.layer()[1][1]
        given[1] = fresh
        assert source.parameters()[1] is fresh.up_gate_proj.weight
        assert source.source().down[1] is fresh.down_proj.weight
        if held == "list":
            given[1] = expert_modules(up_gate[:, :-1], down)[0]
            with pytest.raises(ShapeError, match=r"experts\[1\].up_gate_proj.weight has shape"):
                source.parameters()
            given[1] = None
            with pytest.raises(LayoutError, match="2 local modules"):
                source.parameters()


def per_expert(modules, experts=3, hidden=16, intermediate=12, activation=SWIGLU):
    return PerExpertParameters(modules, experts, hidden, intermediate, activation)


def lacks(name):
    return lambda modules: delattr(modules[2], name)


def has_float64(modules):
    modules[1].down_proj.weight = tensor(np.zeros((12, 16), np.float64), grad=True)


def has_a_result(modules):
    modules[0].down_proj.weight = modules[0].down_proj.weight * 2.0


def has_strides(modules):
    modules[0].down_proj.weight = torch.nn.Parameter(torch.zeros(16, 12).t())


PYTORCH = pytest.mark.skipif(IS_PADDLE, reason="Paddle parameters are contiguous by construction")
REFUSED_MODULES = [
    (
        lacks("up_gate_proj"),
        LayoutError,
        r"experts\[2\] \(Expert\) has no up_gate_proj.weight; needed: gate and up in one",
    ),
    (lacks("down_proj"), LayoutError, r"experts\[2\] \(Expert\) has no down_proj.weight"),
    (has_float64, DTypeError, r"experts\[1\]\.down_proj\.weight is float64"),
    (has_a_result, LayoutError, "result of an operation"),
    pytest.param(has_strides, LayoutError, "not contiguous", marks=PYTORCH),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED_MODULES)
def test_refused_modules(change, error, words):
    modules = expert_modules(*weight_arrays())
    change(modules)
    with pytest.raises(error, match=words):
        per_expert(modules)


OTHER_SIZES = r"experts\[0\]\.\w+\.weight has shape .*needed: \[\w+, \w+\] = "
UNGATED = r"\(16, 24\); needed: \[H, I\] = \(16, 12\)$"
WRONG_ARGUMENTS = [
    ({"experts": 2}, LayoutError, r"3 local modules \(4 entries.*n_experts is 2"),
    (
        {"experts": 4},
        LayoutError,
        r"\(4 entries.*n_experts is 4; pass the number of local experts \(3\)",
    ),
    ({"hidden": 15}, ShapeError, OTHER_SIZES),
    ({"intermediate": 13}, ShapeError, OTHER_SIZES),
    ({"activation": ActivationType.RELU}, ShapeError, OTHER_SIZES),
    # Who brings two halves for an ungated activation is told so.
    ({"activation": ActivationType.SILU}, ShapeError, UNGATED),
]


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG_ARGUMENTS)
def test_arguments_that_the_modules_do_not_fit(wrong, error, words):
    with pytest.raises(error, match=words):
        per_expert([*expert_modules(*weight_arrays()), None], **wrong)


FUSED = r"\[E, H, 2I\] and \[E, I, H\]"


@pytest.mark.parametrize(
    ("shape1", "shape2", "message"),
    [
        ((3, 16), (3, 12, 16), r"weight1 has shape \(3, 16\); needed: \[E, H, 2I\]"),
        ((3, 16, 24), (12, 16), r"weight2 has shape \(12, 16\); needed: \[E, I, H\]"),
        *(
            (up, down, rf"weight1 has .* and weight2 .*; needed: {FUSED}$")
            for up, down in (
                ((3, 16, 23), (3, 12, 16)),
                ((3, 16, 24), (2, 12, 16)),
                ((3, 16, 24), (3, 12, 15)),
                ((3, 24, 16), (3, 12, 16)),
                ((3, 16, 24), (3, 16, 12)),
                ((3, 24, 16), (3, 16, 12)),
            )
        ),
    ],
)
def test_fused_shapes(shape1, shape2, message):
    weights = (parameter(np.zeros(shape, np.float32)) for shape in (shape1, shape2))
    with pytest.raises(ShapeError, match=message):
        FusedParameters(*weights, SWIGLU)
