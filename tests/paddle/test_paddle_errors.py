"""Wrong input is refused at the border, in words that name the argument, what came and what is
needed.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from ernie import (
    FP8,
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

from sonicmoe.errors import FrameworkError, LayoutError, RoutingError, ShapeError
from sonicmoe.interop import check_paddle_version


@pytest.fixture
def node():
    return make_node(make_experts())


@pytest.fixture
def batch():
    return make_batch()


def call(node, batch, **changes):
    arguments = {
        "x": tensor(batch.x),
        "counts": batch.counts,
        "indices": tensor(batch.indices),
        "probs": tensor(batch.probs),
    }
    arguments.update(changes)
    return node(arguments["x"], arguments["counts"], arguments["indices"], arguments["probs"])


def refused(error, *words):
    """`pytest.raises` that wants every word in the message."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(word)})" for word in words))


def test_a_refused_call_leaves_no_trace(batch):
    experts = make_experts()
    node, main_grads = make_node(experts), bind_main_grads(experts)
    run(node, batch)
    for words in ({"counts": [1, 1, 1]}, {"x": tensor(batch.x[:, :5])}):
        with pytest.raises((RoutingError, ShapeError)):
            call(node, batch, **words)
    run(node, batch)
    node.step()
    twice = [numpy(m) for m in main_grads]
    fresh = make_experts()
    other, expected = make_node(fresh), bind_main_grads(fresh)
    run(other, batch)
    run(other, batch)
    other.step()
    assert all(np.array_equal(a, numpy(b)) for a, b in zip(twice, expected, strict=True))


def test_gradient_of_another_dtype_is_refused_in_backward(node, batch):
    """What an FP8 combine would hand back; Paddle reports errors of a backward under its own
    exception.
    """

    class Fp8Gradient(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout[:, :16].contiguous()

    out = Fp8Gradient.apply(Pending(node, batch).out)
    with pytest.raises(Exception, match=r"dout has shape \(40, 16\); needed: \(40, 32\)"):
        out.backward(tensor(batch.dout))


def test_versions_of_paddle_with_and_without_the_proxy():
    for text in ("3.3.0", "3.4.0.dev1", "0.0.0", "10.0.1+cpu"):
        check_paddle_version(text)
    for text in ("3.2.2", "2.6.2", "3.0.0rc1"):
        with refused(FrameworkError, f"paddle {text}", "3.3.0"):
            check_paddle_version(text)


WRITES = {
    "scale_": lambda x: x.scale_(2.0),
    "add_": lambda x: x.add_(paddle.ones_like(x)),
    "zero_": lambda x: x.zero_(),
    "setitem": lambda x: x.__setitem__(slice(None), 0.0),
    "assign": lambda x: paddle.assign(paddle.ones_like(x), x),
    "through a detached tensor": lambda x: x.detach().scale_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_tokens_that_were_written_before_backward_are_refused(write):
    experts, batch = make_experts(), make_batch()
    node = make_node(experts)
    mains = bind_main_grads(experts)
    waiting = Pending(node, batch, x_grad=False)
    with paddle.no_grad():
        WRITES[write](waiting.x)
    with pytest.raises(Exception, match=r"x was written in place.*inplace_version was 0 and is 1"):
        waiting.backward()
    node.step()
    assert not any(main.any() for main in mains), "nothing was added"
    # A write before the forward is none of the backward's business.
    fresh = tensor(batch.x).scale_(1.0)
    call(node, batch, x=fresh).sum().backward()


@pytest.mark.parametrize("free", ["_clear_data", "_clear_to_zero_allocation"])
def test_tokens_that_were_freed_before_backward_are_named(node, batch, free):
    """Old nodes kept no x, and models free the dispatched tokens behind them."""
    pending = Pending(node, batch)
    getattr(pending.x, free)()
    with pytest.raises(Exception, match="x was freed between this node's forward and its backward"):
        pending.backward()


def test_a_node_in_a_static_graph_is_refused(node, batch):
    """`to_static` passes a value of its graph, of which Paddle's internals would complain."""

    def forward(x, indices, probs):
        return node(x, None, indices, probs)

    traced = paddle.jit.to_static(forward, full_graph=True)
    # Paddle raises the error again with the traced lines above it, in the same class.
    with pytest.raises(FrameworkError, match=r"x is a value of a static graph, .*to_static"):
        traced(tensor(batch.x), tensor(batch.indices), tensor(batch.probs))


def test_weights_without_a_device_are_named():
    """Paddle takes no such tensor into a graph; without one nobody asks it for its device."""
    experts = make_experts(dtype="bfloat16")
    node = make_node(experts, FP8, "auto")
    batch, copies = make_batch(), node.make_copies()

    def call(*arguments):
        return node(*arguments, copies=copies)

    wanted = numpy(Pending(node, batch, dtype="bfloat16", call=call).out)
    weights_of(experts)[3]._clear_data()
    with pytest.raises(LayoutError, match=r"weight 3 of the experts .* needed: _clear_to_zero"):
        Pending(node, batch, dtype="bfloat16", call=call)
    with paddle.no_grad():
        found = Pending(node, batch, dtype="bfloat16", call=call).out
    assert np.array_equal(numpy(found), wanted)
