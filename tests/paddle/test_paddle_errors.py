"""Wrong input is refused at the border, in words that name the argument, what came and what is
needed.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from framework import numpy, tensor, torch
from node.node_harness import FP8, Layer

from sonicmoe.errors import FrameworkError, LayoutError
from sonicmoe.interop import check_paddle_version


@pytest.fixture
def layer():
    return Layer(flush="step", main_grad=0.0)


def test_gradient_of_another_shape_is_refused_in_backward(layer):
    """Paddle reports errors of a backward under its own exception."""

    class Narrowed(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout[:, :16].contiguous()

    call = layer.call()
    with pytest.raises(Exception, match=r"dout has shape \(37, 16\); needed: \(37, 80\)"):
        Narrowed.apply(call.out).backward(call.dout)


def test_versions_of_paddle_with_and_without_the_proxy():
    for text in ("3.3.0", "3.4.0.dev1", "0.0.0", "10.0.1+cpu"):
        check_paddle_version(text)
    for text in ("3.2.2", "2.6.2", "3.0.0rc1"):
        with pytest.raises(FrameworkError, match=rf"paddle {text}.*3\.3\.0"):
            check_paddle_version(text)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(slice(None), 0.0),
        lambda x: paddle.assign(paddle.ones_like(x), x),
        lambda x: x.detach().scale_(2.0),
    ],
    ids=["setitem", "assign", "through a detached tensor"],
)
def test_tokens_that_were_written_before_backward_are_refused(layer, write):
    waiting = layer.call(x_grad=False)
    with paddle.no_grad():
        write(waiting.x)
    with pytest.raises(Exception, match=r"x was written in place.*inplace_version was 0 and is 1"):
        waiting.backward()
    layer.node.step()
    assert not layer.has_gradients(), "nothing was added"
    # A write before the forward is none of the backward's business.
    fresh = tensor(layer.problem.x, torch.float32).scale_(1.0)
    layer.node(fresh, *waiting.arguments[1:]).sum().backward()


@pytest.mark.parametrize("free", ["_clear_data", "_clear_to_zero_allocation"])
def test_tokens_that_were_freed_before_backward_are_named(layer, free):
    """Old nodes kept no x, and models free the dispatched tokens behind them."""
    call = layer.call()
    getattr(call.x, free)()
    with pytest.raises(Exception, match="x was freed between this node's forward and its backward"):
        call.backward()


def test_a_node_in_a_static_graph_is_refused(layer):
    """`to_static` passes a value of its graph, of which Paddle's internals would complain."""

    def forward(x, indices, probs):
        return layer.node(x, None, indices, probs)

    x, _, *routed = layer.call().arguments
    traced = paddle.jit.to_static(forward, full_graph=True)
    # Paddle raises the error again with the traced lines above it, in the same class.
    with pytest.raises(FrameworkError, match=r"x is a value of a static graph, .*to_static"):
        traced(x, *routed)


def test_weights_without_a_device_are_named():
    """Paddle takes no such tensor into a graph; without one nobody asks it for its device."""
    layer = Layer(dtype=torch.bfloat16, config=FP8)
    copies = layer.node.make_copies()
    wanted = numpy(layer.call(copies=copies).out)
    layer.weights[3]._clear_data()
    with pytest.raises(LayoutError, match=r"weight 3 of the experts .* needed: _clear_to_zero"):
        layer.call(copies=copies)
    with paddle.no_grad():
        found = layer.call(copies=copies).out
    assert np.array_equal(numpy(found), wanted)
