"""Which of weights and biases train, in every layout and recipe, eagerly and in a graph: each gradient has
the bits of a step in which everything trains, and nothing else is computed.
"""

from __future__ import annotations

import pytest
from framework import torch
from pairwise import pairwise

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.usefixtures("fresh_compiler")
T, E, H, I = 21, 4, 32, 48
LAYOUTS = [WeightLayout(t, s) for t in (False, True) for s in (False, True)]
RECIPES = {
    "off": SonicMoEConfig(),
    "dx256": SonicMoEConfig(fp8_mode="perf"),
    "plain wgrad": SonicMoEConfig(fp8_mode="mem", fp8_wgrad=False),
}
NAMES = ("w1", "w2", "b1", "b2")
TRAINS = {"b1": ["b1"], "b2": ["b2"], "biases": ["b1", "b2"], "weights": ["w1", "w2"]}


def weights_of():
    """Native, biases as large as x W1."""
    generator = torch.Generator().manual_seed(0)
    shapes = (E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H)
    w1, w2, b1, b2 = (torch.randn(shape, generator=generator) for shape in shapes)
    return w1 * H**-0.5, w2 * I**-0.5, b1, b2


def batch():
    """Of expert 2 no token; tokens 3 and 20 are of no expert here, and poison."""
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, T, H, generator=generator)
    ids = torch.tensor([[0, 1], [1, 3], [3, -1], [E, 0]]).repeat(6, 1)[:T]
    for token in (3, T - 1):
        ids[token], x[token], dout[token] = -1, float("nan"), float("inf")
    return x, ids, torch.rand(T, 2, generator=generator), dout


def run(layout, trains, compiled=False):
    """The gradients by name, those of weights and biases native again."""
    w1, w2, b1, b2 = weights_of()
    given = layout.user_w1(w1), layout.user_w2(w2), layout.user_b1(b1), b2
    named = dict(zip(NAMES, (t.clone().contiguous() for t in given), strict=True))
    for name in trains:
        named[name].requires_grad_()
    x, ids, probs, dout = batch()
    x.requires_grad_(), probs.requires_grad_()

    def layer(x, probs, *weights):
        return expert_mlp(x, ids, probs, *weights, ActivationType.SWIGLU_OAI, layout=layout)

    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    call(x, probs, *named.values()).backward(dout)
    back = dict(zip(NAMES, (layout.native_w1, layout.native_w2, layout.native_b1), strict=False))
    found = {n: back.get(n, lambda t: t)(t.grad) for n, t in named.items() if t.grad is not None}
    return {"x": x.grad, "probs": probs.grad, **found}


@pytest.mark.parametrize(
    ("trains", "recipe", "layout", "compiled"),
    pairwise(list(TRAINS), list(RECIPES), LAYOUTS, [False, True]),
    ids=str,
)
def test_only_what_trains_is_computed(trains, recipe, layout, compiled, monkeypatch):
    calls = []
    with RECIPES[recipe].activate():
        wanted = run(WeightLayout(), NAMES)
        for name in ("bias_gradients", "backward_dw"):
            original = getattr(ReferenceEngine, name)

            def noted(self, pending, *targets, name=name, original=original):
                calls.append((name, pending.biases is not None))
                return original(self, pending, *targets)

            monkeypatch.setattr(ReferenceEngine, name, noted)
        found = run(layout, TRAINS[trains], compiled)
    assert set(found) == {"x", "probs", *TRAINS[trains]}
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]) and bool(gradient.isfinite().all()), name
        nothing = gradient[2] if name in NAMES else gradient[[3, T - 1]]
        assert not nothing.any(), name
    # The backward to the tokens sums biases where weight gradients are in FP8, unless nobody asks.
    of_biases = ("bias_gradients", recipe == "dx256")
    assert calls == [("backward_dw", False) if trains == "weights" else of_biases]
