"""Copies and freed weights under PyTorch, on a host."""

from __future__ import annotations

import framework
import pytest

if framework.IS_PADDLE:
    pytest.skip("PyTorch's activation checkpointing", allow_module_level=True)

import torch
from node import copies_layers as layers
from node.direct_layers import ARRANGEMENTS, Setup
from weights.freed_memory import free

from sonicmoe.config import SonicMoEConfig


def setup_for(**changes):
    config = SonicMoEConfig(**{"engine": "reference", "fp8_mode": "perf"} | changes)
    return Setup(config, dtype=torch.bfloat16)


MODES = {
    "perf": ({}, True),
    "mem": ({"fp8_mode": "mem"}, True),
    "iso": ({"iso_weight": True}, False),
    "recompute_z": ({"recompute_z": True}, False),
    "bf16 wgrad": ({"fp8_wgrad": False}, True),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize(("changes", "release"), MODES.values(), ids=MODES)
def test_the_bits_of_a_layer_that_keeps_its_memory(arrangement, changes, release):
    layers.check_freed(setup_for(**changes), arrangement, release)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute(use_reentrant):
    layers.check_recompute(setup_for(), "native", use_reentrant)


def test_inference_reads_copies():
    layer = layers.DirectLayer(setup_for(), "native")
    x, indices, probs, _ = layer.batch()
    with torch.no_grad():
        wanted = layer.node(x, None, indices, probs)
        copies = layer.node.make_copies()
        free(*layer.weights)
        assert torch.equal(layer.node(x, None, indices, probs, copies=copies), wanted)
