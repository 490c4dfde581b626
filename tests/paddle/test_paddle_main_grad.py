"""Where weight gradients go as Paddle holds them, and its hooks. tests/node has the rest."""

from __future__ import annotations

import numpy as np
import pytest
from ernie import assert_weight_gradients, paddle, weight_gradients
from framework import numpy
from node.node_harness import FLUSHES, Layer, problems, want_gradient
from pairwise import pairwise


class FusedBuffer:
    """One fp32 communication buffer; every weight's `main_grad` is a shaped slice of it with guard
    elements around.
    """

    GUARD = 7

    def __init__(self, weights):
        self.weights = weights
        self.starts, offset = [], self.GUARD
        for weight in self.weights:
            self.starts.append(offset)
            offset += int(np.prod(weight.shape)) + self.GUARD
        self.buffer = paddle.full([offset], 123.0, dtype="float32")
        for weight, start in zip(self.weights, self.starts, strict=True):
            piece = self.buffer._slice(start, start + int(np.prod(weight.shape)))
            piece.get_tensor()._set_dims(weight.shape)
            weight.main_grad = piece
            weight.main_grad.fill_(0.0)
        self.bound = [weight.main_grad for weight in self.weights]
        self.pointers = [piece.data_ptr() for piece in self.bound]
        assert self.pointers[0] == self.buffer.data_ptr() + 4 * self.starts[0], (
            "slices must alias the buffer"
        )

    def gradients(self):
        """Read out of the buffer itself, as a reducer does."""
        flat = numpy(self.buffer)
        sizes = [int(np.prod(w.shape)) for w in self.weights]
        return [
            flat[s : s + n].reshape(w.shape)
            for s, n, w in zip(self.starts, sizes, self.weights, strict=True)
        ]

    def assert_only_slices_changed(self):
        """Same objects, addresses and shapes; guards untouched."""
        inside = np.zeros(self.buffer.shape[0], dtype=bool)
        for weight, start, piece, pointer in zip(
            self.weights, self.starts, self.bound, self.pointers, strict=True
        ):
            inside[start : start + int(np.prod(weight.shape))] = True
            assert weight.main_grad is piece
            assert weight.main_grad.data_ptr() == pointer
            assert tuple(weight.main_grad.shape) == tuple(weight.shape)
        assert (numpy(self.buffer)[~inside] == 123.0).all()


def test_main_grad_rebound_by_the_framework_between_micro_batches():
    """Pipelines scale by rebinding and sharding releases buffers: the node must read the attribute
    anew every time.
    """
    layer = Layer(main_grad=0.0)
    layer.run()
    for weight in layer.weights:
        weight.main_grad = weight.main_grad.scale(0.5)
    layer.run()
    assert layer.error(times=1.5) < 1e-5
    for weight in layer.weights:
        weight.main_grad._clear()
        weight.main_grad = None
    layer.run()
    assert layer.error() < 1e-5


class Hooks:
    """`_register_backward_hook` on every weight, as gradient-reduction overlap registers it."""

    def __init__(self, weights, read):
        self.calls = [0] * len(weights)
        self.seen = [None] * len(weights)
        for position, weight in enumerate(weights):
            weight._register_backward_hook(self._hook(position, weight, read))

    def _hook(self, position, weight, read):
        def called(*_):
            self.calls[position] += 1
            gradient = read(weight)
            self.seen[position] = None if gradient is None else numpy(gradient).copy()

        return called


EMPTY = {"one": [2], "all but one": [0, 2, 3], "all": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("kind", "empty", "outstanding"), pairwise(["fused", "None", "absent"], EMPTY, [False, True])
)
def test_hooks_see_complete_gradients_once_per_backward(kind, empty, outstanding):
    """Overlapped reduction counts calls: one per weight and micro-batch, zero-token experts
    included, data complete at that moment.
    """
    batches = problems(3, empty=EMPTY[empty])
    layer = Layer(batches[0], main_grad="absent" if kind == "absent" else None)
    fused = FusedBuffer(layer.weights) if kind == "fused" else None
    hooks = Hooks(layer.weights, lambda w: w.grad if kind == "absent" else w.main_grad)
    calls = map(layer.call, batches)
    for done, call in enumerate(list(calls) if outstanding else calls, 1):
        call.backward()
        assert hooks.calls == [done] * 8
        assert_weight_gradients(hooks.seen, weight_gradients(batches[:done]))
    layer.node.step()
    assert hooks.calls == [3] * 8, "step() fires nothing"
    if fused:
        for got, seen in zip(fused.gradients(), hooks.seen, strict=True):
            np.testing.assert_array_equal(got, seen)
        fused.assert_only_slices_changed()


def test_no_hook_for_frozen_experts():
    layer = Layer()
    hooks = Hooks(layer.weights, lambda w: None)
    for weight in layer.weights:
        want_gradient(weight, False)
    for flush in FLUSHES:
        layer.node = layer.another_node(flush=flush)
        layer.run()
    assert hooks.calls == [0] * 8
