"""Activation recompute, memory modes and determinism: other schedules, the same bits."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from ernie import (
    FP8,
    PRECISE,
    Pending,
    bind_main_grads,
    make_batch,
    make_experts,
    make_node,
    paddle,
    run,
    weights_of,
)
from framework import numpy, tensor
from paddle.distributed.fleet.utils import recompute
from pairwise import pairwise

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.reference import ReferenceEngine

REENTRANT = (True, False)
CONFIGS = {
    "precise": PRECISE,
    "precise stagewise": SonicMoEConfig(stagewise_memory=True),
    "fp8": FP8,
    "fp8 mem": SonicMoEConfig(fp8_mode="mem"),
    "fp8 recompute_z": SonicMoEConfig(fp8_mode="perf", recompute_z=True),
}


def dtype_of(config):
    return "float32" if config.fp8_mode is None else "bfloat16"


def outcome(config, batches, *, flush="step", reentrant=None, together=False, experts=None):
    """Every bit that comes out: out, dx, dprobs per batch and all weight gradients; plus hook calls
    per weight.
    """
    experts = experts or make_experts(dtype=dtype_of(config))
    main_grads, calls = bind_main_grads(experts), [0] * (2 * len(experts))
    for position, weight in enumerate(weights_of(experts)):
        weight._register_backward_hook(
            lambda *_, position=position: calls.__setitem__(position, calls[position] + 1)
        )
    node = make_node(experts, config, flush)

    def call(x, counts, indices, probs):
        if reentrant is None:
            return node(x, counts, indices, probs)
        return recompute(
            lambda x, probs: node(x, counts, indices, probs), x, probs, use_reentrant=reentrant
        )

    bits = []
    if together:
        pending = [Pending(node, batch, dtype=dtype_of(config), call=call) for batch in batches]
        results = [waiting.backward() for waiting in pending]
    else:
        results = [run(node, batch, dtype=dtype_of(config), call=call) for batch in batches]
    node.step()
    for result in results:
        bits += [result.out, result.dx, result.dprobs]
    return bits + [numpy(m) for m in main_grads], calls


def same_bits(first, second):
    assert len(first) == len(second)
    return all(np.array_equal(a, b, equal_nan=False) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("name", "reentrant", "flush", "together"),
    pairwise(CONFIGS, REENTRANT, ["auto", "step"], [False, True]),
    ids=str,
)
def test_recompute_gives_the_same_bits_and_accumulates_once(name, reentrant, flush, together):
    batches = [
        make_batch(seed=1),
        make_batch(0),
        make_batch(seed=2, only=[2]),
        make_batch(seed=3, only=[]),
    ]
    options = {"flush": flush, "together": together}
    plain, plain_calls = outcome(CONFIGS[name], batches, **options)
    again, calls = outcome(CONFIGS[name], batches, reentrant=reentrant, **options)
    assert same_bits(plain, again)
    assert calls == plain_calls == [4] * 6


@pytest.mark.parametrize("reentrant", REENTRANT, ids=["reentrant", "non-reentrant"])
def test_recompute_around_a_block_that_holds_the_node(reentrant):
    """The usual place: a whole layer, router included, whose other tensors are recomputed as well."""
    outcomes = []
    for wrapped in (False, True):
        experts, batch = make_experts(), make_batch()
        node, main_grads = make_node(experts), bind_main_grads(experts)
        scale = tensor(np.float32(1.5), grad=True)
        indices, probs = tensor(batch.indices), tensor(batch.probs)

        def block(x, node=node, scale=scale, indices=indices, probs=probs, counts=batch.counts):
            return node(paddle.tanh(x * scale), counts, indices, probs * scale).square() + x

        x = tensor(batch.x, grad=True)
        out = recompute(block, x, use_reentrant=reentrant) if wrapped else block(x)
        out.backward(tensor(batch.dout))
        node.step()
        outcomes.append([numpy(t) for t in (out, x.grad, scale.grad, *main_grads)])
    assert same_bits(*outcomes)


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
    node, batch = make_node(make_experts(), CONFIGS[name]), make_batch()

    def call(x, counts, ids, probs):
        return recompute(lambda x, p: node(x, counts, ids, p), x, probs, use_reentrant=reentrant)

    pending = Pending(node, batch, dtype="bfloat16", call=call)
    assert saved_z() == 0
    pending.backward()
    assert saved_z() == 0


def test_a_router_that_changes_its_mind_in_recompute_is_refused():
    """Reproduced activations of another routing would be silently wrong gradients."""
    experts, batch = make_experts(), make_batch()
    node, calls = make_node(experts), []
    other = np.where(batch.indices == 0, 1, batch.indices)
    other = np.where((other[:, :1] == other[:, 1:]) & (other >= 0), -1, other)

    def block(x, probs):
        calls.append(1)
        return node(x, None, tensor(batch.indices if len(calls) == 1 else other), probs)

    x, probs = tensor(batch.x, grad=True), tensor(batch.probs, grad=True)
    out = recompute(block, x, probs, use_reentrant=False)
    with pytest.raises(Exception, match="routing differs between forward and recompute"):
        out.backward(tensor(batch.dout))
