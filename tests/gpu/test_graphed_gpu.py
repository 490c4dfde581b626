"""A layer as two CUDA graphs: the bits of the node, for any batch up to the captured size, and errors
where a replay would compute something else.
"""

from __future__ import annotations

import pytest
import torch
from node.direct_layers import DirectLayer, Setup, assert_same_bits

from sonicmoe import SonicMoEConfig
from sonicmoe.errors import ConfigError, DTypeError, ShapeError

pytestmark = pytest.mark.gpu

SIZES, T = (6, 256, 128, 2), 300
FP8 = SonicMoEConfig(engine="hopper", fp8_mode="perf")
BF16 = SonicMoEConfig(engine="bf16", fp8_mode="off")


def layer_of(config=FP8, **options):
    return DirectLayer(Setup(config, "cuda", torch.bfloat16, SIZES, T), "native", **options)


def batch(layer, tokens, seed=0):
    """x, indices, probs, dout; of no token, too."""
    x, indices, probs, dout = (tensor.detach()[:tokens] for tensor in layer.batch(seed, T + 1))
    return x.requires_grad_(), indices, probs.requires_grad_(), dout


def captured(layer):
    """The layer as graphs, for `T` tokens."""
    return layer.node.graphed(*(tensor.detach() for tensor in batch(layer, T, 99)[:3]))


def nothing_was_added(layer):
    return not any(bool(gradient.any()) for gradient in layer.main_grads)


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_the_bits_of_the_node(config):
    """Micro-batches of several sizes, then an optimizer step, and again."""
    ours, theirs = layer_of(config), layer_of(config)
    graphs = captured(ours)
    assert nothing_was_added(ours), "capturing added gradients"
    for round_ in range(3):
        for seed, tokens in enumerate((T, 1, 0, 37, T, 130)):
            given = batch(ours, tokens, seed)
            found = ours.run(given, node=lambda x, _, ids, probs: graphs(x, ids, probs))
            wanted = theirs.run(given)
            assert_same_bits(
                [*found, *ours.main_grads], [*wanted, *theirs.main_grads], (round_, tokens)
            )
        for layer in (ours, theirs):
            layer.node.step()
            with torch.no_grad():
                for weight in layer.weights:
                    weight.sub_(0.05 * weight.main_grad.to(weight.dtype))
            layer.clear()


def test_no_grad_and_frozen_tokens():
    layer = layer_of()
    graphs, (x, ids, probs, dout) = captured(layer), batch(layer, 100)
    with torch.no_grad():
        out = graphs(x, ids, probs)
    assert not out.requires_grad
    again = graphs(x.detach(), ids, probs.detach())
    assert torch.equal(out, again)
    again.backward(dout)
    assert all(bool(gradient.any()) for gradient in layer.main_grads)


def test_what_a_replay_cannot_serve_raises():
    layer = layer_of()
    graphs, (x, ids, probs, dout) = captured(layer), batch(layer, 64)
    up, down = layer.weights
    first, _ = graphs(x, ids, probs), graphs(x, ids, probs)
    with pytest.raises(RuntimeError, match=r"1 forward\(s\) ran since"):
        first.backward(dout)
    out = graphs(x, ids, probs)
    with pytest.raises(RuntimeError, match="gradients of some inputs alone"):
        torch.autograd.grad(out, x, dout, retain_graph=True)
    with pytest.raises(RuntimeError, match="they lie elsewhere"):
        kept, down.data = down.data, down.data.clone()
        graphs(x, ids, probs)
    down.data = kept
    up.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        out.backward(dout)
    assert nothing_was_added(layer)
    for wrong, kind in (
        ((x.float(), ids, probs), DTypeError),
        ((x, ids.int(), probs), DTypeError),
        (batch(layer, T + 1)[:3], ShapeError),
        ((x, ids[:3], probs), ShapeError),
    ):
        with pytest.raises(kind, match="captured"):
            graphs(*wrong)


def test_what_cannot_be_captured_is_refused():
    without = layer_of()
    for weight in without.weights:
        del weight.main_grad
    waits = layer_of(flush="step")
    checks = layer_of(SonicMoEConfig(engine="hopper", fp8_mode="perf", validate_dispatch=True))
    reference = layer_of(SonicMoEConfig(engine="reference", fp8_mode="perf"))
    for layer, words in (
        (without, "^weight1 has no main_grad"),
        (checks, "validate_dispatch"),
        (reference, "waits for the device"),
        (waits, "gradients would wait"),
    ):
        with pytest.raises(ConfigError, match=words):
            captured(layer)
    assert nothing_was_added(waits)
