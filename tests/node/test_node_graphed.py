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


@pytest.mark.skipif(IS_PADDLE, reason="graphs are PyTorch's here")
def test_weights_that_are_others_by_now_are_refused():
    from sonicmoe.node.graphed import check_in_place

    layer = Layer()
    held = layer.weights
    places = [weight.data_ptr() for weight in held]
    check_in_place(list(held), held, places)
    others = [torch.nn.Parameter(held[0].detach().clone()), *held[1:]]
    with pytest.raises(RuntimeError, match="other weights by now"):
        check_in_place(others, held, places)
    held[1].data = held[1].data.clone()
    with pytest.raises(RuntimeError, match="they lie elsewhere"):
        check_in_place(list(held), held, places)


@pytest.mark.skipif(IS_PADDLE, reason="graphs are PyTorch's here")
def test_a_weight_without_main_grad_is_named():
    from sonicmoe.node.graphed import _check_destinations

    held = Layer().weights
    for weight in held:
        weight.main_grad = torch.zeros(weight.shape)
    trained = [True] * len(held)
    _check_destinations(list(held), trained, str)
    held[1].main_grad = None
    with pytest.raises(ConfigError, match=r"^experts\[1\] has no main_grad; a replay adds to"):
        _check_destinations(list(held), trained, lambda index: f"experts[{index}]")


def test_settings_that_wait_are_refused_first():
    layer = Layer(config=SonicMoEConfig(validate_dispatch=True))
    with pytest.raises(ConfigError, match="validate_dispatch reads ids on the host"):
        layer.node.graphed(*samples(layer))
