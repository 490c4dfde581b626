"""When gradients move: with `flush="step"` nobody touches the memory of gradients that wait; correct
loops read no warning.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from node.node_harness import (
    ARRANGEMENTS,
    FLUSHES,
    Layer,
    assert_equal,
    no_room,
    problems,
)

from sonicmoe.layer import questions

each_flush = pytest.mark.parametrize("flush", FLUSHES)


def scale(layer, factor=0.5):
    """In place, as gradient accumulation does."""
    with torch.no_grad():
        for weight in layer.weights:
            weight.main_grad.scale_(factor) if IS_PADDLE else weight.main_grad.mul_(factor)


zero = Layer.zero_main_grad


def remove(layer):
    layer.set_main_grad(None)


def replace(layer):
    layer.set_main_grad(0.0)


def take_away(layer):
    for weight in layer.weights:
        del weight.main_grad


def in_one_buffer(layer, buffer=None):
    """`main_grad` of every weight as a new view of one buffer, which is returned."""
    sizes = [int(np.prod(tuple(weight.shape))) for weight in layer.weights]
    if buffer is None:
        buffer = tensor(np.zeros(sum(sizes)), torch.float32)
    first = 0
    for weight, size in zip(layer.weights, sizes, strict=True):
        weight.main_grad = buffer[first : first + size].view(list(weight.shape))
        first += size
    return buffer


CLEARINGS = (zero, remove, replace)


class TestWhileGradientsWait:
    """The memory that they go to stays where it is, and nobody else writes it."""

    @pytest.mark.parametrize("touch", [zero, scale, remove, replace, take_away])
    def test_the_next_backward_and_step_refuse_and_drop_nothing(self, touch):
        """Nobody can tell a skipped batch from a reduction that came too early."""
        layer = Layer(flush="step", main_grad=1.0)
        layer.run()
        touch(layer)
        words = r"experts\[0\].up_gate_proj.weight.*gradients of 1 backward.*discard_grads\(\)"
        for _ in range(2):
            with pytest.raises((RuntimeError, OSError), match=words):
                layer.run()
            with pytest.raises(RuntimeError, match=words):
                layer.node.step()
        replace(layer)
        layer.node.discard_grads()
        layer.step(None, None)
        assert layer.error(times=2) < 1e-5

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_new_views_of_the_same_memory_are_the_same_memory(self, said, arrangement):
        layer = Layer(arrangement=arrangement, flush="step")
        buffer = None
        for _ in range(4):
            buffer = in_one_buffer(layer, buffer)
            layer.run()
        in_one_buffer(layer, buffer)
        layer.node.step()
        assert layer.error(times=4) < 1e-5 and said() == []

    def test_of_a_view_into_a_buffer_the_version_says_nothing(self):
        """Its neighbours write the same counter."""
        layer = Layer(flush="step")
        buffer = in_one_buffer(layer)
        layer.run()
        buffer.add_(tensor(np.ones(tuple(buffer.shape)), torch.float32))
        layer.node.step()
        assert layer.error(held=1) < 1e-5

    def test_memory_that_is_made_in_place_of_none_is_added_to(self):
        """A framework that makes `main_grad` in its first hook; from then on it stays."""
        layer = Layer(flush="step", main_grad=None)
        layer.run()
        replace(layer)
        layer.run()
        kept = [weight.main_grad for weight in layer.weights]
        replace(layer)
        with pytest.raises(RuntimeError, match="main_grad lies elsewhere"):
            layer.node.step()
        for weight, held in zip(layer.weights, kept, strict=True):
            weight.main_grad = held
        layer.node.step()
        assert layer.error(times=2) < 1e-5

    def test_a_grad_that_goes_is_refused(self):
        """Without `main_grad` the place is `.grad`; autograd adds there by itself."""
        layer = Layer(flush="step")
        layer.step()
        layer.run()
        for weight in layer.weights:
            weight.clear_gradient(False) if IS_PADDLE else setattr(weight, "grad", None)
        with pytest.raises((RuntimeError, OSError), match=r"weight\.grad lies elsewhere"):
            layer.run()
        layer.node.discard_grads()
        layer.step()
        assert layer.error(attribute="grad") < 1e-5

    def test_a_replaced_parameter_does_not_get_the_old_ones_gradient(self):
        layer = Layer(flush="step", main_grad=0.0)
        call = layer.call()
        projection = layer.experts[0].down_proj
        old = projection.weight
        projection.weight = parameter(numpy(old), old.dtype)
        projection.weight.main_grad = None
        call.backward()
        with pytest.raises(RuntimeError, match="wait for 1 expert parameters that the modules"):
            layer.node.step()
        layer.node.discard_grads()
        assert projection.weight.main_grad is None and not numpy(old.main_grad).any()


def optimizer_of(weights):
    """A plain one, which reads `.grad`."""
    if IS_PADDLE:
        import paddle

        return paddle.optimizer.SGD(1e-3, parameters=weights)
    return torch.optim.SGD(weights, lr=1e-3)


class TestQuestions:
    def test_a_loop_that_never_calls_step_is_asked_once(self, said, monkeypatch):
        """`main_grad` stays None, so that no optimizer touches the experts and nothing changes."""
        if IS_PADDLE:  # whose optimizers announce nothing
            monkeypatch.setattr(questions, "BACKWARDS", 12)
        layer = Layer(problems(1, hidden=8, intermediate=8)[0], flush="step", main_grad=None)
        optimizer = optimizer_of(layer.weights)
        for _ in range(14):
            layer.run()
            optimizer.step()
        (line,) = said()
        assert "step() never came" in line

    @pytest.mark.skipif(not IS_PADDLE, reason="Paddle's models have main_grad by themselves")
    @pytest.mark.parametrize("gpu", [False, True])
    @each_flush
    def test_an_optimizer_that_reads_grad_alone_is_asked_about(self, said, flush, gpu, monkeypatch):
        """On a GPU, which only is made up here, one layer of a process looks, and its last step reads
        the one value.
        """
        monkeypatch.setattr(questions, "is_cuda", lambda held: gpu)
        one = problems(1, hidden=8, intermediate=8)[0]
        layers = [Layer(one, flush=flush, main_grad=None) for _ in range(2)]
        optimizers = [optimizer_of(layer.weights) for layer in layers]
        for step in range(questions.STEPS + 2):
            for layer, optimizer in zip(layers, optimizers, strict=True):
                layer.step()
                optimizer.step()
                optimizer.clear_grad()
            assert bool(said()) == (step >= questions.STEPS)
        (line,) = said()
        assert "no optimizer clears main_grad" in line
        looked = [layer.node._state.questions.same is not None for layer in layers]
        assert looked == [True, not gpu]


WAYS = {
    "auto": ({"flush": "auto"}, "left a part of them in main_grad; zero main_grad"),
    "step": ({"flush": "step"}, r"left a part of them in the node; call node.discard_grads\(\)"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_fails_half_way_leaves_nothing_unseen(way):
    """dw2 added, then out of memory: neither step() nor a release takes it for a gradient, and the
    node goes on after discard_grads().
    """
    options, words = WAYS[way]
    layer, wanted = Layer(main_grad=0.0, **options), Layer(main_grad=0.0)
    layer.run()
    with no_room(half_way=True):
        layer.run()
    for refused in (layer.node.step, layer.node.flush_grads):
        with pytest.raises(RuntimeError, match=words):
            refused()
    with pytest.raises(RuntimeError, match="discard_grads"):
        layer.node.release_grads()
    layer.node.discard_grads()
    if way == "auto":
        layer.zero_main_grad()
    layer.node.step()
    assert not layer.has_gradients()
    for each in (layer, wanted):
        each.step()
    assert_equal(layer.gradients(), wanted.gradients())
    layer.node.release_grads()
