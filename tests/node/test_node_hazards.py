"""What a caller may do around a backward: none of it gives a wrong number without a word, in any mode.

Weights replaced, frozen, freed or written in between, gradients asked for in other ways than
`backward()`, copies of a node, threads, gradient memory that is none.
"""

from __future__ import annotations

import copy
import threading
from functools import partial
from itertools import product

import numpy as np
import pytest
from engine.moe_golden import golden
from framework import IS_PADDLE, numpy, relative_rmse, torch
from node.node_harness import (
    ARRANGEMENTS,
    CONFIGS,
    FLUSHES,
    Layer,
    gradients_of,
    recomputed,
)
from pairwise import pairwise
from weights.freed_memory import free

from sonicmoe.errors import LayoutError

every_flush = pytest.mark.parametrize("flush", FLUSHES)
each_arrangement = pytest.mark.parametrize("arrangement", ARRANGEMENTS)
only_torch = pytest.mark.skipif(IS_PADDLE, reason="PyTorch has it")
only_paddle = pytest.mark.skipif(not IS_PADDLE, reason="Paddle has it")


def made(flush="auto", value=0.0, **options):
    return Layer(flush=flush, main_grad=value, **options)


class TestAskedFor:
    """Gradients that the caller takes for itself are never accumulated as well."""

    REFUSED = "asked for the gradient of an expert weight"

    @pytest.mark.parametrize(
        ("flush", "value"), [*product(FLUSHES, (0.0, None)), ("step", "absent")]
    )
    def test_a_weights_gradient_that_autograd_does_not_get_is_refused(self, flush, value):
        layer = made(flush, value)
        attribute = "grad" if value == "absent" else "main_grad"
        with pytest.raises((RuntimeError, OSError), match=self.REFUSED):
            gradients_of(layer.call(), [layer.weights[2]])
        layer.node.step()
        held = [getattr(weight, attribute) for weight in layer.weights]
        assert not any(each is not None and numpy(each).any() for each in held)
        layer.step()
        assert layer.error(attribute=attribute) < 1e-5

    def test_one_that_autograd_hands_over_is_returned(self):
        layer = made("auto", "absent")
        call = layer.call()
        got = gradients_of(call, [layer.weights[5], call.x])
        wanted = golden(layer.problem)
        assert relative_rmse(numpy(got[0]), wanted.dw2[1]) < 1e-5
        assert relative_rmse(numpy(got[1]), wanted.dx) < 1e-5
        layer.node.step()
        assert all(weight.grad is None for weight in layer.weights)

    @only_torch
    @every_flush
    def test_a_backward_to_some_weights_adds_to_these(self, flush):
        layer = made(flush)
        call = layer.call()
        call.out.backward(call.dout, inputs=[layer.weights[1], call.x])
        layer.node.step()
        one, *others = [layer.weights[1], layer.weights[0], *layer.weights[2:]]
        assert relative_rmse(numpy(one.main_grad), golden(layer.problem).dw1[1]) < 1e-5
        assert not any(numpy(other.main_grad).any() for other in others)


@only_paddle
class TestInsideOtherBackwards:
    """Paddle tells no backward what it was asked for, so the call stack is read."""

    @every_flush
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_gradients_of_tokens_through_recompute(self, flush, use_reentrant):
        layer = made(flush)
        call = layer.call()
        leaves = [call.x, call.probs]
        x, probs = (leaf * 1.0 for leaf in leaves)
        given = x, call.counts, call.indices, probs
        call.out = recomputed(layer.node, *given, use_reentrant=use_reentrant)
        wanted = golden(layer.problem)
        for got, want in zip(gradients_of(call, leaves), (wanted.dx, wanted.dprobs), strict=True):
            assert relative_rmse(numpy(got), want) < 1e-5
        layer.node.step()
        assert not layer.has_gradients()

    @every_flush
    @pytest.mark.parametrize("how", ["Tensor.backward", "autograd.backward"])
    def test_a_whole_backward_from_a_hook_of_another_graph(self, flush, how):
        import paddle

        layer = made(flush)
        call = layer.call()
        other = paddle.ones([3])
        other.stop_gradient = False
        doubled = other * 2
        runs = {
            "Tensor.backward": lambda _: call.out.backward(call.dout),
            "autograd.backward": lambda _: paddle.autograd.backward([call.out], [call.dout]),
        }
        doubled.register_hook(runs[how])
        paddle.grad(doubled.sum(), other)
        layer.node.step()
        assert layer.error() < 1e-5
        assert relative_rmse(call.dx, golden(layer.problem).dx) < 1e-5


class TestParameters:
    """Some are results of operations; test_node_gradients.py has experts that changed places."""

    @only_torch
    @every_flush
    def test_results_of_operations_pass_their_gradient_on_or_are_refused(self, flush):
        layer, original = self.parametrized(flush)
        if flush == "auto":
            layer.run()
            assert relative_rmse(numpy(original.grad), 2 * golden(layer.problem).dw1[0]) < 1e-5
            return
        words = r"^experts\[0\].up_gate_proj.weight is the result of an operation"
        with pytest.raises(LayoutError, match=words):
            layer.run()
        layer.node.step()
        assert original.grad is None

    def parametrized(self, flush):
        """A weight that is twice a parameter, since the node was made."""

        class Twice(torch.nn.Module):
            def forward(self, weight):
                return 2 * weight

        layer, projection = made(flush, "absent"), torch.nn.Module()
        weight = layer.experts[0].up_gate_proj.weight
        projection.weight = torch.nn.Parameter(weight.detach() / 2)
        layer.experts[0].up_gate_proj = projection
        torch.nn.utils.parametrize.register_parametrization(projection, "weight", Twice())
        return layer, projection.parametrizations.weight.original


def freed(layer, after="nothing"):
    """As PyTorch's sharding does: a storage resized to nothing, and back with other or the same
    values.
    """
    for weight in layer.weights:
        kept, storage = weight.detach().clone(), weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        if after != "nothing":
            storage.resize_(size)
            weight.data.copy_(kept if after == "the same" else torch.full_like(kept, 7.0))


def replaced(layer):
    """Another storage leaves the old one to the backward."""
    for weight in layer.weights:
        weight.data = torch.full_like(weight, 7.0)


def cleared(layer, comes_back=False):
    """As Paddle's sharding does."""
    for weight in layer.weights:
        values = weight.detach().clone()
        weight._clear_data()
        if comes_back:
            values._share_buffer_to(weight)


EVENTS = (
    {"cleared": cleared, "cleared and back": partial(cleared, comes_back=True)}
    if IS_PADDLE
    else {
        "freed": freed,
        "freed, then others": partial(freed, after="others"),
        "freed, then the same": partial(freed, after="the same"),
        "replaced": replaced,
    }
)


class TestWeightsInBetween:
    """Freed between a forward and its backward: gradients of the forward's weights. On a GPU, where a
    native engine may read the parameters themselves, an error. autograd/test_what_a_backward_reads.py
    has those that are written.
    """

    @pytest.mark.parametrize("case", pairwise(EVENTS, CONFIGS, ARRANGEMENTS), ids=str)
    def test_the_backward_is_of_the_forwards_weights(self, case):
        event, config, arrangement = case
        options = {"arrangement": arrangement, "config": CONFIGS[config]}
        layer, undisturbed = made(**options), made(**options)
        wanted = undisturbed.run()
        call = layer.call()
        EVENTS[event](layer)
        call.backward()
        assert np.array_equal(call.dx, wanted.dx)

    @pytest.mark.parametrize("happens", ["written", "freed"])
    def test_what_a_gpu_reads_where_it_lies(self, happens, weights_on_a_gpu):
        layer = made(arrangement="native")
        call = layer.call()
        for weight in layer.weights:
            if happens == "freed":
                free(weight)
            else:  # by an operation that Paddle counts
                weight.detach().add_(weight.detach())
        with pytest.raises((RuntimeError, OSError), match="which reads them where they lie"):
            call.backward()
        assert not layer.has_gradients()

    @only_torch
    @each_arrangement
    def test_freed_before_step(self, arrangement):
        layer = made("step", arrangement=arrangement)
        layer.run()
        free(*layer.weights)
        layer.node.step()
        assert layer.error() < 1e-5


class TestGradientMemory:
    """What is refused of it is in test_node_direct.py."""

    @only_torch
    @every_flush
    @pytest.mark.parametrize("leaf", [True, False])
    def test_that_wants_a_gradient_itself_is_added_to(self, flush, leaf):
        layer = made(flush)
        for weight in layer.weights:
            weight.main_grad.requires_grad_()
            weight.main_grad = weight.main_grad if leaf else weight.main_grad * 1
        layer.step()
        assert layer.error() < 1e-5

    @every_flush
    def test_of_a_backward_that_a_hook_ended_goes_with_its_clearing(self, flush):
        layer = made(flush)
        call = layer.call()
        call.x.register_hook(lambda _: 1 / 0)
        with pytest.raises((ZeroDivisionError, OSError)):
            call.backward()
        layer.zero_main_grad()
        if flush == "step":
            with pytest.raises((RuntimeError, OSError), match="was written while gradients of 1"):
                layer.run()
            layer.node.discard_grads()
        layer.step()
        assert layer.error() < 1e-5


class TestThreads:
    @every_flush
    @pytest.mark.parametrize("value", [0.0, None, "absent"])
    def test_add_one_after_the_other(self, flush, value):
        """Three threads run backwards of two nodes over the same experts."""
        if IS_PADDLE and value == "absent":
            pytest.skip("Paddle itself adds to one .grad from several threads at once")
        layer = made(flush, value)
        other, failed = copy.copy(layer), []
        other.node = layer.another_node()

        def work(each):
            try:
                for call in [each.call() for _ in range(4)]:
                    call.backward()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(each,)) for each in (layer, other, layer)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        for each in (layer, other):
            each.node.step()
        assert layer.error(times=12, attribute="grad" if value == "absent" else "main_grad") < 1e-5
