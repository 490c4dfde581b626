"""w1 as two tensors, gate and up, through the functional API: the bits of one tensor in halves, a
gradient for each, and nothing stale of either.
"""

from __future__ import annotations

import pytest
from framework import torch
from functional.following import Following
from pairwise import pairwise

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


def step(face, bias, in_halves, **options):
    """The output and all gradients, w1's as one tensor in halves."""
    x, gate, up, w2, b1, b2 = tensors = leaves(bias)
    w1 = turned(gate), turned(up)
    if in_halves:
        joined = torch.nn.Parameter(torch.cat([gate, up], 1).detach())
        w1, tensors, options = (
            turned(joined),
            (x, joined, *tensors[3:]),
            {**options, "concat_layout": True},
        )
    out = face(x, w1, turned(w2), b1, b2, **options)
    out.square().sum().backward()
    dx, *found = (t.grad for t in tensors if t is not None)
    if not in_halves:
        assert all(gradient.is_contiguous() for gradient in found[:2])
        # Autograd took both as they left the engine, side by side.
        assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
        found[:2] = [torch.cat(found[:2], 1)]
    return out.detach(), dx, *found


@pytest.mark.parametrize(
    ("face", "bias", "use_fp8"), pairwise([whole_layer, general, compiled], *2 * [(False, True)])
)
def test_the_bits_of_one_tensor_in_halves(fresh_compiler, face, bias, use_fp8):
    """b1 beside them is in halves, whatever `concat_layout` says."""
    wanted = step(general if face is compiled else face, bias, True, use_fp8=use_fp8)
    for concat_layout in (False, True):
        found = step(face, bias, False, use_fp8=use_fp8, concat_layout=concat_layout)
        assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted)


@pytest.mark.parametrize("face", [general, compiled])
@pytest.mark.parametrize("trains", [(True, False), (False, True), (False, False)])
def test_only_one_trains(fresh_compiler, trains, face):
    x, *halves, w2, b1, b2 = leaves()
    for half, is_trained in zip(halves, trains, strict=True):
        half.requires_grad_(is_trained)
    face(x, tuple(map(turned, halves)), turned(w2), b1, b2).square().sum().backward()
    wanted = step(general, False, False)[2].chunk(2, 1)
    for half, is_trained, gradient in zip(halves, trains, wanted, strict=True):
        assert torch.equal(half.grad, gradient) if is_trained else half.grad is None
        # Without the memory of the other.
        assert not is_trained or half.grad.untyped_storage().nbytes() == half.grad.nbytes


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
