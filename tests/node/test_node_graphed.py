"""`graphed()` where there are no graphs: refused by name, and nothing else changes."""

from __future__ import annotations

import pytest
from framework import IS_PADDLE, torch
from node_harness import Layer

from sonicmoe import SonicMoEConfig
from sonicmoe.errors import ConfigError, DeviceError, FrameworkError


def samples(layer):
    p = layer.problem
    return torch.zeros(p.x.shape), torch.zeros([1, 2], dtype=torch.int64), torch.zeros([1, 2])


def test_a_host_has_no_graphs():
    layer = Layer()
    kind, words = (FrameworkError, "for PyTorch") if IS_PADDLE else (DeviceError, "x is on cpu")
    with pytest.raises(kind, match=words):
        layer.node.graphed(*samples(layer))


def test_settings_that_wait_are_refused_first():
    layer = Layer(config=SonicMoEConfig(validate_dispatch=True))
    with pytest.raises(ConfigError, match="validate_dispatch reads ids on the host"):
        layer.node.graphed(*samples(layer))
