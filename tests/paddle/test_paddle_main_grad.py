"""Where weight gradients go as Paddle holds them, and its hooks. tests/node has the rest."""

from __future__ import annotations

import numpy as np
import pytest
from ernie import (
    PRECISE_BOUND,
    Pending,
    assert_weight_gradients,
    bind_main_grads,
    golden,
    make_batch,
    make_experts,
    make_node,
    paddle,
    run,
    weights_of,
)
from framework import numpy
from pairwise import pairwise

FLUSHES = ("auto", "step")


@pytest.fixture
def experts():
    return make_experts()


class FusedBuffer:
    """One fp32 communication buffer; every weight's `main_grad` is a shaped slice of it with guard
    elements around.
    """

    GUARD = 7

    def __init__(self, experts, fill=0.0):
        self.weights = weights_of(experts)
        self.starts, offset = [], self.GUARD
        for weight in self.weights:
            self.starts.append(offset)
            offset += int(np.prod(weight.shape)) + self.GUARD
        self.buffer = paddle.full([offset], 123.0, dtype="float32")
        for weight, start in zip(self.weights, self.starts, strict=True):
            piece = self.buffer._slice(start, start + int(np.prod(weight.shape)))
            piece.get_tensor()._set_dims(weight.shape)
            weight.main_grad = piece
            weight.main_grad.fill_(fill)
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


def test_main_grad_rebound_by_the_framework_between_micro_batches(experts):
    """Pipelines scale by rebinding and sharding releases buffers: the node must read the attribute
    anew every time.
    """
    node, batch = make_node(experts, flush="auto"), make_batch()
    wanted = golden(experts, [batch]).dw
    bind_main_grads(experts)
    run(node, batch)
    for weight in weights_of(experts):
        weight.main_grad = weight.main_grad.scale(0.5)
    run(node, batch)
    assert_weight_gradients(
        [w.main_grad for w in weights_of(experts)], [1.5 * w for w in wanted], PRECISE_BOUND
    )
    for weight in weights_of(experts):
        weight.main_grad._clear()
        weight.main_grad = None
    run(node, batch)
    assert_weight_gradients([w.main_grad for w in weights_of(experts)], wanted, PRECISE_BOUND)


class Hooks:
    """`_register_backward_hook` on every weight, as gradient-reduction overlap registers it."""

    def __init__(self, experts, read):
        self.calls = [0] * len(weights_of(experts))
        self.seen = [None] * len(self.calls)
        for position, weight in enumerate(weights_of(experts)):
            weight._register_backward_hook(self._hook(position, weight, read))

    def _hook(self, position, weight, read):
        def called(*_):
            self.calls[position] += 1
            gradient = read(weight)
            self.seen[position] = None if gradient is None else numpy(gradient).copy()

        return called


@pytest.mark.parametrize(
    ("kind", "only", "outstanding"),
    pairwise(["fused", "None", "absent"], [None, [1], []], [False, True]),
    ids=str,
)
def test_hooks_see_complete_gradients_once_per_backward(experts, kind, only, outstanding):
    """Overlapped reduction counts calls: one per weight and micro-batch, zero-token experts
    included, data complete at that moment.
    """
    batches = [make_batch(seed=s, only=only) for s in range(3)]
    fused = FusedBuffer(experts) if kind == "fused" else None
    if kind == "None":
        for weight in weights_of(experts):
            weight.main_grad = None
    read = (lambda w: w.grad) if kind == "absent" else (lambda w: w.main_grad)
    hooks, node = Hooks(experts, read), make_node(experts, flush="auto")
    calls = (Pending(node, batch) for batch in batches)
    for done, call in enumerate(list(calls) if outstanding else calls, 1):
        call.backward()
        assert hooks.calls == [done] * 6
        assert_weight_gradients(hooks.seen, golden(experts, batches[:done]).dw, PRECISE_BOUND)
    node.step()
    assert hooks.calls == [3] * 6, "step() fires nothing"
    if fused:
        assert_weight_gradients(fused.gradients(), hooks.seen, 0.0)
        fused.assert_only_slices_changed()


def test_no_hook_for_frozen_experts(experts):
    hooks = Hooks(experts, lambda w: None)
    for weight in weights_of(experts):
        weight.stop_gradient = True
    for flush in FLUSHES:
        run(make_node(experts, flush=flush), make_batch())
    assert hooks.calls == [0] * 6
