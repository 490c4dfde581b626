"""w1 as two tensors, gate and up, through the functional API: a gradient for each, and nothing stale of
either. tests/oracle has the bits of one tensor in halves.
"""

from __future__ import annotations

import pytest
from framework import torch
from functional.following import Following

from sonicmoe import moe_general_routing_inputs, moe_TC_softmax_topk_layer
from sonicmoe.errors import ShapeError
from sonicmoe.functional import moe_general_routing_inputs_fp8, moe_TC_softmax_topk_layer_fp8
from sonicmoe.layer.plan import Plan

E, H, I, K, T = 5, 32, 64, 2, 19


def made(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.3)


def leaves(bias=False):
    """x, gate, up, w2, b1, b2."""
    biases = (made(5, E, 2 * I), made(6, E, H)) if bias else (None, None)
    return made(1, T, H), made(2, E, I, H), made(3, E, I, H), made(4, E, H, I), *biases


def turned(weight):
    return weight.permute(1, 2, 0)


def triples():
    experts = torch.arange(K * T) % E
    return torch.full((K * T,), 0.5), torch.arange(T).repeat_interleave(K), experts


def whole_layer(x, w1, w2, b1, b2, **options):
    return moe_TC_softmax_topk_layer(x, made(7, E, H), w1, b1, w2, b2, K, **options)[0]


def general(x, w1, w2, b1, b2, **options):
    options["max_experts_per_token"] = K
    return moe_general_routing_inputs(x, *triples(), w1, b1, w2, b2, **options)[0]


def compiled(*given, **options):
    return torch.compile(general, fullgraph=True, backend="aot_eager")(*given, **options)


def gradients(face, *trains, **options):
    """Of gate and up."""
    x, *halves, w2, b1, b2 = leaves(bias=True)
    for half, is_trained in zip(halves, trains, strict=True):
        half.requires_grad_(is_trained)
    face(x, tuple(map(turned, halves)), turned(w2), b1, b2, **options).square().sum().backward()
    return [half.grad for half in halves]


@pytest.mark.parametrize("face", [general, compiled])
def test_a_gradient_for_each(fresh_compiler, face):
    """b1 beside them is in halves, whatever `concat_layout` says."""
    wanted = gradients(face, True, True)
    # Autograd took both as they left the engine, side by side.
    assert all(gradient.is_contiguous() for gradient in wanted)
    assert len({gradient.untyped_storage().data_ptr() for gradient in wanted}) == 1
    assert all(map(torch.equal, gradients(face, True, True, concat_layout=True), wanted))
    for trains in ((True, False), (False, True), (False, False)):
        for gradient, is_trained, whole in zip(
            gradients(face, *trains), trains, wanted, strict=True
        ):
            if not is_trained:
                assert gradient is None
                continue
            # Without the memory of the other.
            assert torch.equal(gradient, whole)
            assert gradient.untyped_storage().nbytes() == gradient.nbytes


def test_upstreams_fp8_functions_take_them_as_they_lie():
    x, gate, up, w2, *biases = leaves()
    wanted = general(x, (turned(gate), turned(up)), turned(w2), *biases, use_fp8=True)
    out, _ = moe_general_routing_inputs_fp8(x, *triples(), (gate, up), w2, E, "swiglu")
    assert torch.equal(out, wanted)
    router = made(7, E, H)
    wanted = whole_layer(x, (turned(gate), turned(up)), turned(w2), *biases, use_fp8=True)
    out = moe_TC_softmax_topk_layer_fp8(x, router, (gate, up), w2, K, "swiglu")[0]
    assert torch.equal(out, wanted)
    with pytest.raises(ShapeError, match=r"w1\[0\] has shape \(5, 64\); needed: \[E, I, H\]"):
        moe_TC_softmax_topk_layer_fp8(x, router, (gate[:, :, 0], up), w2, K, "swiglu")


@pytest.mark.parametrize("written", [1, 2], ids=["gate", "up"])
def test_codes_follow_a_write_to_either(monkeypatch, written):
    engine, tensors = Following(), leaves()
    monkeypatch.setattr(Plan, "chosen", property(lambda _: engine, lambda *_: None))
    x, gate, up, w2, *biases = tensors

    def call():
        return general(x, (turned(gate), turned(up)), turned(w2), *biases, use_fp8=True)

    first, out = call(), call()
    assert engine.events == ["made"]
    with torch.no_grad():
        tensors[written].mul_(-1.5)
    changed = call()
    assert engine.events == ["made", "remade"] and not torch.equal(changed, first)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    # Through `.data` no counter moves; the engine looks by itself.
    tensors[written].data.mul_(2.0)
    assert not torch.equal(call(), changed) and engine.events[2:] == ["found"]
    # Another tensor in the place of either has codes of its own.
    (gate, up) = (gate.clone(), up) if written == 1 else (gate, up.clone())
    call()
    assert engine.events[3:] == ["made"]
