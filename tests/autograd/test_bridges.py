"""One operation through the bridge of the framework under test: whose gradients arrive where, and
what a call keeps alive. How engines' tensors are saved and dropped is tested with the node.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch

from sonicmoe import autograd
from sonicmoe.ep.dispatcher import Dispatcher
from sonicmoe.ep.interface import Received, Transport
from sonicmoe.interop import requires_grad


class Affine(autograd.DifferentiableCall):
    """`(2 x + 3 y, 5 y)`; the parameter gets `weight_gradient`, or accumulates for itself."""

    def __init__(self, weight_gradient=None):
        self.weight_gradient = weight_gradient
        self.backwards = []

    def forward(self, inputs, *, save):
        x, y = inputs
        assert save
        return (2 * x + 3 * y, 5 * y), None

    def backward(self, gradients, saved, **about):
        first, second = gradients
        self.backwards.append(about)
        assert saved is None
        return (2 * first, 3 * first + 5 * second), [self.weight_gradient]


def arguments(x_grad=True, y_grad=True):
    x, y = (
        tensor(np.full((2, 3), value), torch.float32, grad=grad)
        for value, grad in ((1.0, x_grad), (10.0, y_grad))
    )
    return x, y, parameter(np.ones(4), torch.float32)


def gradient(leaf):
    return None if leaf.grad is None else set(numpy(leaf.grad).ravel())


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("y_grad", [True, False])
def test_inputs_that_want_a_gradient_get_one(x_grad, y_grad):
    x, y, weight = arguments(x_grad, y_grad)
    one, two = autograd.apply(Affine(), (x, y), [weight])
    assert set(numpy(one).ravel()) == {32.0} and set(numpy(two).ravel()) == {50.0}
    (one + two).sum().backward()
    assert gradient(x) == ({2.0} if x_grad else None)
    assert gradient(y) == ({8.0} if y_grad else None)


def test_an_output_that_nobody_used_counts_as_zeros():
    x, y, weight = arguments()
    autograd.apply(Affine(), (x, y), [weight])[1].sum().backward()
    assert gradient(x) == {0.0} and gradient(y) == {5.0}


@pytest.mark.parametrize("returned", [None, 7.0])
def test_frozen_inputs_do_not_cut_a_parameter_off(returned):
    x, y, weight = arguments(False, False)
    fired = []
    if IS_PADDLE:
        weight._register_backward_hook(lambda: fired.append(1))
    else:
        weight.register_hook(lambda _: fired.append(1))
    value = None if returned is None else tensor(np.full(4, returned), torch.float32)
    call = Affine(value)
    one, _ = autograd.apply(call, (x, y), [weight])
    assert requires_grad(one)
    one.sum().backward()
    assert len(call.backwards) == 1
    if returned is None:
        assert weight.grad is None or not numpy(weight.grad).any()
    else:
        assert gradient(weight) == {7.0}
    assert fired == [1] or (returned is None and not IS_PADDLE)


@pytest.mark.skipif(IS_PADDLE, reason="Paddle names neither")
def test_pytorch_says_whether_parameters_are_reached():
    x, y, weight = arguments()
    call = Affine()
    one, _ = autograd.apply(call, (x, y), [weight])
    torch.autograd.grad(one.sum(), y, retain_graph=True)
    one.sum().backward()
    asked, whole = call.backwards
    assert asked["reached"] == [False] and whole["reached"] == [True]
    assert not asked["collected"] and not whole["collected"]


@pytest.mark.skipif(not IS_PADDLE, reason="PyTorch has its own test above")
def test_under_paddle_the_call_stack_says_whether_parameters_are_reached():
    import paddle

    x, y, weight = arguments()
    call = Affine()
    for asked in (y, [y], (y, weight)):
        one, _ = autograd.apply(call, (x, y), [weight])
        paddle.grad(one.sum(), asked, allow_unused=True)
    for run in (paddle.Tensor.backward, paddle.autograd.backward):
        one, _ = autograd.apply(call, (x, y), [weight])
        run(one.sum())
    reached = [(*about["reached"], about["collected"]) for about in call.backwards]
    assert reached == [(False, False)] * 2 + [(True, True)] + [(True, False)] * 2


@pytest.mark.skipif(IS_PADDLE, reason="transforms are PyTorch's")
def test_transforms_are_refused_and_what_is_left_of_them_is_taken():
    x, y, w = arguments()
    left = []

    def transformed(value):
        left.append(value)
        return value.sum()

    torch.func.grad(transformed)(x.detach())
    one, _ = autograd.apply(Affine(), (left[0], y), (w,))
    assert one.shape == x.shape
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: autograd.apply(Affine(), (x, y), (w,))[0].sum())(x.detach())


@pytest.mark.skipif(IS_PADDLE, reason="Paddle has another bridge")
def test_a_pytorch_without_the_names_of_the_shorter_way(monkeypatch):
    monkeypatch.setattr("sonicmoe.autograd.torch_bridge._unwrap", None)
    test_inputs_that_want_a_gradient_get_one(True, True)


def test_a_graph_of_the_gradients_is_refused():
    """Also where it goes around the operation, through a residual."""
    x, y, weight = arguments()
    for residual in (0.0, 1.0):
        one, _ = autograd.apply(Affine(), (x, y), [weight])
        loss = (one + residual * x).sum()
        with pytest.raises(
            (RuntimeError, OSError), match=r"no second derivative.*create_graph=True"
        ):
            framework_grad(loss, x, create_graph=True)


def framework_grad(loss, leaf, **options):
    if IS_PADDLE:
        import paddle

        return paddle.grad(loss, leaf, **options)
    return torch.autograd.grad(loss, leaf, **options)


class Echo(Transport):
    """One rank: every token comes back as it went."""

    name = "echo"

    def __init__(self):
        super().__init__(2, 1, 0)

    def dispatch(self, x, topk_idx, topk_weights, meanwhile=None):
        return Received(x * 1, topk_idx, topk_weights * 1, None, "handle")

    def dispatch_cached(self, x, handle):
        return x * 1

    def combine(self, x, handle, weights=None):
        return x * 1, None if weights is None else weights * 1


def test_a_dispatch_keeps_none_of_its_outputs_alive():
    """An output that its own call kept would hold the graph, and the graph the call, until the
    garbage collector comes. What was called meanwhile goes at once.
    """
    dispatcher = Dispatcher(Echo())
    x = tensor(np.ones((4, 8)), torch.float32, grad=True)
    weights = tensor(np.ones((4, 2)), torch.float32, grad=True)
    meanwhile = lambda: None  # noqa: E731
    called = weakref.ref(meanwhile)
    given = x, tensor(np.tile([0, 1], (4, 1))), weights
    tokens = dispatcher.dispatch(*given, meanwhile=meanwhile)
    del meanwhile
    assert called() is None
    out = dispatcher.combine(tokens.x * 2, tokens.handle)
    (out.sum() + tokens.probs.sum()).backward()
    assert gradient(x) == {2.0} and gradient(weights) == {1.0}
    arrived = weakref.ref(tokens.x)
    gc.disable()
    try:
        del tokens, out
        assert arrived() is None
    finally:
        gc.enable()
