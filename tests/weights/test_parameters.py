"""Both arrangements of the user's weights become one native form and get gradients in their own
layout; others are refused.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, torch
from weights.weight_sources import (
    SOURCES,
    SWIGLU,
    expert_modules,
    weight_arrays,
)

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.errors import LayoutError, ShapeError
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.weights.parameters import PerExpertParameters

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
