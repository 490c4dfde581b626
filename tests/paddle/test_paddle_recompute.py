"""Activation recompute around the node keeps no z between the passes. tests/oracle has the bits of the node, and
tests/fleet/test_double.py recomputes a whole layer, router included.
"""

from __future__ import annotations

import weakref

import pytest
from framework import torch
from node.node_harness import FP8, Layer, recomputed

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.reference import ReferenceEngine

CONFIGS = {"fp8": FP8, "fp8 mem": SonicMoEConfig(fp8_mode="mem")}


@pytest.fixture
def saved_z(monkeypatch):
    """How many of the z that an engine kept for backward are alive."""
    references, forward = [], ReferenceEngine.forward

    def spy_forward(self, *args, **kwargs):
        out, saved = forward(self, *args, **kwargs)
        if saved is not None and saved.z is not None:
            references.append(weakref.ref(getattr(saved.z, "bytes", saved.z)))
        return out, saved

    monkeypatch.setattr(ReferenceEngine, "forward", spy_forward)
    return lambda: sum(reference() is not None for reference in references)


@pytest.mark.parametrize("name", ["fp8", "fp8 mem"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recompute_keeps_no_z_between_the_passes(name, reentrant, saved_z):
    """Everything kept goes through `save_for_backward`: a tensor on the context would survive
    recompute's discarding.
    """
    layer = Layer(dtype=torch.bfloat16, config=CONFIGS[name])
    node = layer.node
    layer.node = lambda x, counts, ids, probs: recomputed(
        lambda x, probs: node(x, counts, ids, probs), x, probs, use_reentrant=reentrant
    )
    call = layer.call()
    assert saved_z() == 0
    call.backward()
    assert saved_z() == 0
