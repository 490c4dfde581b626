"""Low-rank adapters as an argument of the node, under either framework, against the golden of the layer
whose weights have them merged.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.low_rank_golden import Adapted
from engine.moe_golden import make_problem
from framework import IS_PADDLE, numpy, parameter, relative_rmse, tensor, torch
from node.node_harness import Layer, want_gradient

from sonicmoe.engine.low_rank import Adapters, LowRank
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ShapeError

SWIGLU, RELU = ActivationType.SWIGLU, ActivationType.RELU_SQ


def trained_pairs(adapted, arrangement, dtype=None):
    """Leaves, with rows of `up.b` in the order of the arrangement's weights."""
    pairs = {}
    for name, (a, b) in adapted.exact.items():
        rows = adapted.order if (name, arrangement) == ("up", "native") else slice(None)
        given = (parameter(factor, dtype or torch.float32) for factor in (a, b[:, rows]))
        pairs[name] = LowRank(*given, adapted.scale)
    return Adapters(pairs.get("up"), pairs.get("down"))


def freeze(layer):
    for weight in layer.weights:
        want_gradient(weight, False)


def errors_of(layer, call, adapters, adapted):
    exact, order = adapted.golden, np.argsort(adapted.order)
    found = {
        name: relative_rmse(
            numpy(getattr(call, name)) if name == "out" else getattr(call, name),
            getattr(exact, name),
        )
        for name in ("out", "dx", "dprobs")
    }
    for name, pair in zip(("up", "down"), adapters, strict=True):
        for factor in ("a", "b") if pair is not None else ():
            got, wanted = numpy(getattr(pair, factor).grad), adapted.gradients()[f"{name}.{factor}"]
            if (name, factor) == ("up", "b") and layer.arrangement != "native":
                wanted = wanted[:, order]
            found[f"{name}.{factor}"] = relative_rmse(got, wanted)
    return found


@pytest.mark.parametrize(
    ("arrangement", "activation", "which"),
    [
        ("per_expert", SWIGLU, ("up", "down")),
        ("fused", RELU, ("up",)),
        ("fused", SWIGLU, ("down",)),
        ("native", SWIGLU, ("up", "down")),
    ],
    ids=str,
)
def test_beside_frozen_weights(arrangement, activation, which, monkeypatch):
    """No product of the weights' gradients runs, and the node takes no memory for them."""
    monkeypatch.delattr(ReferenceEngine, "backward_dw")
    problem = make_problem(activation)
    layer, adapted = Layer(problem, arrangement=arrangement), Adapted(problem, which=which)
    freeze(layer)
    adapters = trained_pairs(adapted, arrangement)
    call = layer.run(adapters=adapters)
    found = errors_of(layer, call, adapters, adapted)
    assert len(found) == 3 + 2 * len(which) and max(found.values()) < 2e-6, found
    assert layer.node.gradient_bytes == 0 and all(w.grad is None for w in layer.weights)


def test_beside_weights_that_train_and_over_several_calls():
    problem = make_problem(SWIGLU)
    layer, adapted = Layer(problem, main_grad=0.0), Adapted(problem)
    adapters = trained_pairs(adapted, "per_expert")
    first, second = layer.call(adapters=adapters), layer.call(adapters=adapters)
    plain = layer.call()
    plain.backward()
    without = [gradient.copy() for gradient in layer.gradients()]
    for call in (second, first):
        call.backward()
    for name, gradient, alone in zip(("dw1", "dw2"), layer.gradients(), without, strict=True):
        assert relative_rmse(gradient - alone, 2 * getattr(adapted.golden, name)) < 2e-6
    assert relative_rmse(numpy(adapters.down.a.grad), 2 * adapted.gradients()["down.a"]) < 2e-6


def test_rows_that_are_sorted_and_biases():
    problem = make_problem(SWIGLU, bias=True, topk=1, empty=())
    problem.indices[:] = np.sort(np.abs(problem.indices) % 4, 0)
    layer, adapted = Layer(problem), Adapted(problem)
    adapters = trained_pairs(adapted, "per_expert")
    counts = tensor(np.bincount(problem.indices[:, 0], minlength=4))
    x, probs = (tensor(array, torch.float32) for array in (problem.x, problem.probs[:, 0]))
    biases = tuple(parameter(b, torch.float32) for b in (problem.b1, problem.b2))
    out = layer.node.forward_sorted(x, counts, probs, biases=biases, adapters=adapters)
    assert relative_rmse(numpy(out), adapted.golden.out) < 2e-6
    out.backward(tensor(problem.dout, torch.float32))
    assert relative_rmse(numpy(biases[0].grad), adapted.golden.db1) < 2e-6
    assert relative_rmse(numpy(adapters.down.b.grad), adapted.gradients()["down.b"]) < 2e-6


def test_what_is_refused():
    problem = make_problem(SWIGLU)
    layer, adapted = Layer(problem), Adapted(problem)
    adapters = trained_pairs(adapted, "per_expert")
    with pytest.raises(TypeError, match="adapters is tuple; needed: an Adapters, or None"):
        layer.call(adapters=(adapters.up, adapters.down))
    short = adapters.up._replace(a=adapters.up.a[:, :, :79])
    with pytest.raises(ShapeError, match=r"^up\.a has shape"):
        layer.call(adapters=Adapters(short))
    call = layer.call(adapters=adapters)
    with torch.no_grad():
        adapters.up.b.zero_()
    with pytest.raises(OSError if IS_PADDLE else RuntimeError, match=r"up\.b was written in place"):
        call.backward()
