"""`flush="auto"` on a host: gradient memory of every kind, and whatever may go wrong meanwhile. The
same checks run on GPU engines in tests/gpu/test_node_direct_gpu.py.
"""

from __future__ import annotations

import pytest
from framework import IS_PADDLE

if IS_PADDLE:
    pytest.skip("written for PyTorch; test_node_direct.py has Paddle's", allow_module_level=True)

import torch
from node import direct_layers as layers
from node.direct_layers import ARRANGEMENTS, MEMORY, DirectLayer, Setup
from pairwise import pairwise

from sonicmoe import SonicMoEConfig
from sonicmoe.errors import LayoutError

SETUPS = {
    "full": Setup(SonicMoEConfig(engine="reference", fp8_mode="off")),
    "fp8": Setup(SonicMoEConfig(engine="reference", fp8_mode="perf"), dtype=torch.bfloat16),
}
setups = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
arrangements = pytest.mark.parametrize("arrangement", ARRANGEMENTS)
memories = pytest.mark.parametrize("memory", MEMORY)
covered = pytest.mark.parametrize(
    ("setup", "arrangement", "memory"), pairwise(SETUPS, ARRANGEMENTS, MEMORY)
)


@covered
def test_the_bits_of_step_mode(setup, arrangement, memory):
    layers.check_same_bits_as_step_mode(SETUPS[setup], arrangement, memory)


@arrangements
@pytest.mark.parametrize("flush", ["auto", "step"])
def test_nodes_over_the_same_experts(arrangement, flush):
    layers.check_stacked_nodes(SETUPS["full"], arrangement, flush)


def test_expanded_memory_is_refused():
    """All rows would be one."""
    layer = DirectLayer(SETUPS["full"])
    weight = layer.weights[1]
    weight.main_grad = torch.zeros(weight.shape[1]).expand(weight.shape)
    with pytest.raises(LayoutError, match="under which its elements overlap"):
        layer.run(layer.batch())
