"""A layer as two CUDA graphs: the bits of the node, for any batch up to the captured size, and errors
where a replay would compute something else.
"""

from __future__ import annotations

import pytest
import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import ConfigError, DTypeError, ShapeError

pytestmark = pytest.mark.gpu

E, H, I, K, T = 6, 256, 128, 2, 300
FP8 = SonicMoEConfig(engine="hopper", fp8_mode="perf")
BF16 = SonicMoEConfig(engine="bf16", fp8_mode="off")


def weights(main_grad=True):
    generator = torch.Generator("cuda").manual_seed(1)
    made = []
    for shape in ((E, 2 * I, H), (E, H, I)):
        values = torch.randn(shape, generator=generator, device="cuda") * shape[2] ** -0.5
        made.append(torch.nn.Parameter(values.to(torch.bfloat16)))
        if main_grad:
            made[-1].main_grad = torch.zeros(shape, device="cuda")
    return made


def batch(tokens, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, dout = torch.randn(2, tokens, H, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, E, generator=generator, device="cuda").topk(K, 1).indices
    ids[torch.rand(tokens, K, generator=generator, device="cuda") < 0.2] = -1
    probs = torch.rand(tokens, K, generator=generator, device="cuda")
    return x.requires_grad_(), ids, probs.requires_grad_(), dout


def samples():
    x, ids, probs, _ = batch(T, 99)
    return x.detach(), ids, probs.detach()


def step(layer, made, given, eager=False):
    x, ids, probs, dout = given
    x.grad = probs.grad = None
    out = layer(x, None, ids, probs) if eager else layer(x, ids, probs)
    out.backward(dout)
    return [out.detach(), x.grad, probs.grad, *(w.main_grad.clone() for w in made)]


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_the_bits_of_the_node(config):
    """Micro-batches of several sizes, then an optimizer step, and again."""
    ours, theirs = weights(), weights()
    node = SonicMoEMlpNode.from_native(*theirs, config=config)
    graphed = SonicMoEMlpNode.from_native(*ours, config=config)
    layer = graphed.graphed(*samples())
    assert not any(w.main_grad.any() for w in ours), "capturing added gradients"
    for round_ in range(3):
        for seed, tokens in enumerate((T, 1, 0, 37, T, 130)):
            given = batch(tokens, seed)
            found, wanted = step(layer, ours, given), step(node, theirs, given, eager=True)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other), (round_, tokens)
        for made, owner in ((ours, graphed), (theirs, node)):
            owner.step()
            with torch.no_grad():
                for weight in made:
                    weight.sub_(0.05 * weight.main_grad.to(weight.dtype))
                    weight.main_grad.zero_()


def test_no_grad_and_frozen_tokens():
    made = weights()
    layer = SonicMoEMlpNode.from_native(*made, config=FP8).graphed(*samples())
    x, ids, probs, dout = batch(100)
    with torch.no_grad():
        out = layer(x, ids, probs)
    assert not out.requires_grad
    again = layer(x.detach(), ids, probs.detach())
    assert torch.equal(out, again)
    again.backward(dout)
    assert all(w.main_grad.any() for w in made)


def test_what_a_replay_cannot_serve_raises():
    made = weights()
    layer = SonicMoEMlpNode.from_native(*made, config=FP8).graphed(*samples())
    x, ids, probs, dout = batch(64)
    first, _ = layer(x, ids, probs), layer(x, ids, probs)
    with pytest.raises(RuntimeError, match=r"1 forward\(s\) ran since"):
        first.backward(dout)
    out = layer(x, ids, probs)
    with pytest.raises(RuntimeError, match="gradients of some inputs alone"):
        torch.autograd.grad(out, x, dout, retain_graph=True)
    with pytest.raises(RuntimeError, match="they lie elsewhere"):
        kept, made[1].data = made[1].data, made[1].data.clone()
        layer(x, ids, probs)
    made[1].data = kept
    made[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        out.backward(dout)
    assert not any(w.main_grad.any() for w in made)
    for wrong, kind in (
        ((x.float(), ids, probs), DTypeError),
        ((x, ids.int(), probs), DTypeError),
        ((batch(T + 1)[0], *batch(T + 1)[1:3]), ShapeError),
        ((x, ids[:3], probs), ShapeError),
    ):
        with pytest.raises(kind, match="captured"):
            layer(*wrong)


def test_what_cannot_be_captured_is_refused():
    with pytest.raises(ConfigError, match=r"^weight1 has no main_grad"):
        SonicMoEMlpNode.from_native(*weights(main_grad=False), config=FP8).graphed(*samples())
    settings = SonicMoEConfig(engine="hopper", fp8_mode="perf", validate_dispatch=True)
    with pytest.raises(ConfigError, match="validate_dispatch"):
        SonicMoEMlpNode.from_native(*weights(), config=settings).graphed(*samples())
    reference = SonicMoEConfig(engine="reference", fp8_mode="perf")
    with pytest.raises(ConfigError, match="waits for the device"):
        SonicMoEMlpNode.from_native(*weights(), config=reference).graphed(*samples())
    made = weights()
    with pytest.raises(ConfigError, match="gradients would wait"):
        SonicMoEMlpNode.from_native(*made, config=FP8, flush="step").graphed(*samples())
    assert not any(w.main_grad.any() for w in made)
