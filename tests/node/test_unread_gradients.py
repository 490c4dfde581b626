"""`main_grad` that no optimizer reads is named once, and nothing else is taken for it."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import ARRANGEMENTS, Layer

from sonicmoe.node import unread_gradients
from sonicmoe.node.unread_gradients import UnreadGradients

STEPS = UnreadGradients.STEPS


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """A process says it once; every test is a process of its own in this respect."""
    monkeypatch.setattr(unread_gradients, "_said", set())


@pytest.fixture
def said(caplog):
    """The warnings about unread gradients so far."""
    caplog.set_level(logging.INFO, logger="sonicmoe")
    yield lambda: [r.getMessage() for r in caplog.records if "no optimizer reads" in r.getMessage()]


def layer_with_main_grad(value=None, **options):
    layer = Layer(**options)
    layer.set_main_grad(value)
    return layer


def plain_optimizer(weights, rate=0.01):
    """One that looks at `.grad` alone."""
    if IS_PADDLE:
        import paddle

        return paddle.optimizer.AdamW(rate, parameters=weights)
    return torch.optim.AdamW(weights, lr=rate)


def clear(optimizer):
    optimizer.clear_grad() if IS_PADDLE else optimizer.zero_grad()


def train(layer, steps, update=lambda: None, micro_batches=1):
    for _ in range(steps):
        for _ in range(micro_batches):
            layer.run()
        layer.node.step()
        update()


def write(weight, factor=2):
    with torch.no_grad():
        weight.copy_(tensor(factor * numpy(weight), weight.dtype))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("flush", ["auto", "step", "backward"])
def test_a_plain_optimizer_is_named_once(said, arrangement, flush):
    layers = [layer_with_main_grad(arrangement=arrangement, flush=flush) for _ in range(2)]
    before = [numpy(weight) for weight in layers[0].weights]
    for layer in layers:
        optimizer = plain_optimizer(layer.weights)

        def update(optimizer=optimizer):
            optimizer.step()
            clear(optimizer)

        train(layer, STEPS - 1, update)
        assert len(said()) == (layer is layers[1]), "too early"
        train(layer, STEPS, update)
    (line,) = said()
    assert f"over {STEPS} step() calls nobody cleared it and nobody wrote the weights" in line
    for weight, was in zip(layers[0].weights, before, strict=True):
        assert np.array_equal(numpy(weight), was), "the repro trains, and proves nothing"


def zero(layer):
    for weight in layer.weights:
        weight.main_grad.zero_()


def drop(layer):
    layer.set_main_grad(None)


def replace(layer):
    layer.set_main_grad(0.0)


@pytest.mark.parametrize("how", [zero, drop, replace])
def test_a_cleared_main_grad_is_no_warning_also_with_a_learning_rate_of_0(said, how):
    layer = layer_with_main_grad()
    train(layer, 3 * STEPS, lambda: how(layer))
    assert said() == []


def test_a_written_weight_is_no_warning(said):
    layer = layer_with_main_grad()
    train(layer, 3 * STEPS, lambda: write(layer.weights[0], 1.01))
    assert said() == []


@pytest.mark.skipif(IS_PADDLE, reason="Paddle's optimizers write the same values without a trace")
def test_the_same_values_written_again_are_no_warning(said):
    layer = layer_with_main_grad()
    train(layer, 3 * STEPS, lambda: write(layer.weights[0], 1))
    assert said() == []


def test_one_update_of_many_steps_ends_the_watch(said):
    """Accumulation over fewer `step()` calls than the watch is long."""
    layer = layer_with_main_grad()
    train(layer, STEPS - 2)
    zero(layer)
    train(layer, 3 * STEPS)
    assert said() == []


def test_micro_batches_and_evaluation_are_no_steps(said):
    layer = layer_with_main_grad()
    train(layer, 1, micro_batches=3 * STEPS)
    for _ in range(3 * STEPS):
        with torch.no_grad():
            layer.call(x_grad=False, probs_grad=False)
        layer.node.step()  # nothing was added since the last one
    assert said() == []


def test_frozen_weights_and_weights_without_main_grad_are_no_warning(said):
    frozen = layer_with_main_grad()
    for weight in frozen.weights:
        if IS_PADDLE:
            weight.stop_gradient = True
        else:
            weight.requires_grad_(False)
    train(frozen, 3 * STEPS)
    train(Layer(), 3 * STEPS)
    assert said() == []


def test_fleets_face_is_not_asked(said):
    train(layer_with_main_grad(flush="prompt"), 3 * STEPS)
    assert said() == []


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_gpu_is_asked_for_no_value(said, monkeypatch, on_gpu):
    """There version counters tell under PyTorch, and nothing does under Paddle."""
    monkeypatch.setattr(unread_gradients, "is_cuda", lambda _: on_gpu)
    looked = []
    real = unread_gradients._total
    monkeypatch.setattr(unread_gradients, "_total", lambda t: looked.append(real(t)) or looked[-1])
    train(layer_with_main_grad(), 2 * STEPS)
    assert all((total is None) == on_gpu for total in looked)
    assert len(said()) == (0 if on_gpu and IS_PADDLE else 1)
    train(updated := layer_with_main_grad(), 2 * STEPS, lambda: zero(updated))
    assert len(said()) == (0 if on_gpu and IS_PADDLE else 1)


def test_a_copied_layer_is_watched_by_itself():
    watch = UnreadGradients(asks=False)
    assert copy.deepcopy(watch)._steps_left == 0
    layer = layer_with_main_grad()
    train(layer, 2)
    assert copy.deepcopy(layer.node)._state._unread._steps_left == STEPS
