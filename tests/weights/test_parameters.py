"""Experts as modules: which are here, and what is seen of those that are replaced."""

from __future__ import annotations

import sys
from operator import is_

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, torch
from weights.weight_sources import (
    SWIGLU,
    expert_modules,
    weight_arrays,
)

from sonicmoe.errors import LayoutError, ShapeError
from sonicmoe.weights.parameters import PerExpertParameters


def experts_of_modules():
    """Experts of the framework's own modules, whose `__getattr__` finds parts, in a list of its own."""
    nn = sys.modules["paddle"].nn if IS_PADDLE else torch.nn
    module = nn.Layer if IS_PADDLE else nn.Module

    class Linear(module):
        def __init__(self, weight):
            super().__init__()
            self.weight = parameter(np.asarray(weight, np.float32))

    class Member(module):
        def __init__(self, up, down):
            super().__init__()
            self.up_gate_proj, self.down_proj = Linear(up), Linear(down)

    held = nn.LayerList() if IS_PADDLE else nn.ModuleList()
    held.extend([Member(*pair) for pair in zip(*weight_arrays(), strict=True)])
    return held


def test_none_entries_are_other_ranks_experts():
    up_gate, down = weight_arrays()
    a, b, c = expert_modules(up_gate, down)
    source = PerExpertParameters([None, a, None, b, c, None], 3, 16, 12, SWIGLU)
    np.testing.assert_array_equal(numpy(source.native()[1]), down.transpose(0, 2, 1))


@pytest.mark.parametrize("make", [lambda: expert_modules(*weight_arrays()), experts_of_modules])
def test_replaced_modules_and_parts_are_seen(make):
    """Weights are read where modules keep them, and by attribute where they are not there."""
    experts, others = make(), make()
    source = PerExpertParameters(experts, 3, 16, 12, SWIGLU)
    experts[0], experts[1].down_proj = others[0], others[1].down_proj
    experts[2].up_gate_proj.weight = others[2].up_gate_proj.weight
    wanted = [expert.up_gate_proj.weight for expert in (others[0], experts[1], others[2])]
    wanted += [expert.down_proj.weight for expert in (others[0], others[1], experts[2])]
    assert all(map(is_, source.parameters(), wanted))
    assert source.source().down[1] is others[1].down_proj.weight


def test_replaced_modules_are_checked():
    up_gate, down = weight_arrays()
    experts = expert_modules(up_gate, down)
    source = PerExpertParameters(experts, 3, 16, 12, SWIGLU)
    experts[1] = expert_modules(up_gate[:, :-1], down)[0]
    with pytest.raises(ShapeError, match=r"experts\[1\].up_gate_proj.weight has shape"):
        source.parameters()
    experts[1] = None
    with pytest.raises(LayoutError, match="2 local modules"):
        source.parameters()
