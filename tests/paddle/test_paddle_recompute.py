"""Activation recompute around the node, and what it keeps. tests/oracle has the bits of the node alone."""

from __future__ import annotations

import weakref

import numpy as np
import paddle
import pytest
from framework import numpy, tensor, torch
from node.node_harness import FP8, Layer, assert_equal, recomputed

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.reference import ReferenceEngine

REENTRANT = (True, False)
CONFIGS = {"fp8": FP8, "fp8 mem": SonicMoEConfig(fp8_mode="mem")}


def recompute_calls(layer, reentrant):
    """From now on the calls of the layer run again in their backward."""
    node = layer.node

    def call(x, counts, ids, probs):
        return recomputed(
            lambda x, probs: node(x, counts, ids, probs), x, probs, use_reentrant=reentrant
        )

    layer.node = call


@pytest.mark.parametrize("reentrant", REENTRANT, ids=["reentrant", "non-reentrant"])
def test_recompute_around_a_block_that_holds_the_node(reentrant):
    """The usual place: a whole layer, router included, whose other tensors are recomputed as well."""
    outcomes = []
    for wrapped in (False, True):
        layer = Layer(flush="step", main_grad=0.0)
        call, scale = layer.call(), tensor(np.float32(1.5), grad=True)
        x, counts, indices, probs = call.arguments

        def block(x, node=layer.node, scale=scale, indices=indices, probs=probs, counts=counts):
            return node(paddle.tanh(x * scale), counts, indices, probs * scale).square() + x

        out = recomputed(block, x, use_reentrant=reentrant) if wrapped else block(x)
        out.backward(call.dout)
        layer.node.step()
        outcomes.append([numpy(t) for t in (out, x.grad, scale.grad)] + layer.gradients())
    assert_equal(*outcomes)


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
@pytest.mark.parametrize("reentrant", REENTRANT, ids=["reentrant", "non-reentrant"])
def test_recompute_keeps_no_z_between_the_passes(name, reentrant, saved_z):
    """Everything kept goes through `save_for_backward`: a tensor on the context would survive
    recompute's discarding.
    """
    layer = Layer(dtype=torch.bfloat16, config=CONFIGS[name])
    recompute_calls(layer, reentrant)
    call = layer.call()
    assert saved_z() == 0
    call.backward()
    assert saved_z() == 0
