"""Where weight gradients go: every kind of `main_grad`, both flush modes, and the framework's
hooks.
"""

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
from framework import numpy, tensor

FLUSHES = ("auto", "step")


@pytest.fixture
def experts():
    return make_experts()


@pytest.fixture
def batch():
    return make_batch()


@pytest.fixture
def wanted(experts, batch):
    return golden(experts, [batch]).dw


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


@pytest.mark.parametrize("flush", FLUSHES)
def test_slices_of_a_fused_buffer(experts, batch, wanted, flush):
    node, fused = make_node(experts, flush=flush), FusedBuffer(experts)
    run(node, batch)
    if flush == "step":
        assert not any(g.any() for g in fused.gradients()), "nothing arrives before step()"
        node.step()
    assert_weight_gradients(fused.gradients(), wanted, PRECISE_BOUND)
    fused.assert_only_slices_changed()
    assert all(w.grad is None for w in weights_of(experts))


@pytest.mark.parametrize("flush", FLUSHES)
def test_main_grad_none_is_created_and_then_kept(experts, batch, wanted, flush):
    node = make_node(experts, flush=flush)
    for weight in weights_of(experts):
        weight.main_grad = None
    run(node, batch)
    node.flush_grads()
    created = [weight.main_grad for weight in weights_of(experts)]
    assert all(c.dtype == paddle.float32 for c in created)
    run(node, batch)
    node.step()
    assert all(
        weight.main_grad is c for weight, c in zip(weights_of(experts), created, strict=True)
    )
    assert_weight_gradients(created, [2 * w for w in wanted], PRECISE_BOUND)
    assert len({c.data_ptr() for c in created}) == len(created)
    assert all(w.grad is None for w in weights_of(experts))


def test_main_grad_rebound_by_the_framework_between_micro_batches(experts, batch, wanted):
    """Pipelines scale by rebinding and sharding releases buffers: the node must read the attribute
    anew every time.
    """
    node = make_node(experts, flush="auto")
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


@pytest.mark.parametrize("kind", ["fused", "None", "absent"])
@pytest.mark.parametrize("only", [None, [1], []], ids=["all experts", "two empty", "all empty"])
@pytest.mark.parametrize("flush", ["auto", "backward"])
def test_hooks_see_complete_gradients_once_per_backward(experts, kind, only, flush):
    """Overlapped reduction counts calls: one per weight and micro-batch, zero-token experts
    included, data complete at that moment.
    """
    batches = [make_batch(seed=s, only=only) for s in range(3)]
    if kind == "fused":
        FusedBuffer(experts)
    elif kind == "None":
        for weight in weights_of(experts):
            weight.main_grad = None
    read = (lambda w: w.grad) if kind == "absent" else (lambda w: w.main_grad)
    hooks, node = Hooks(experts, read), make_node(experts, flush=flush)
    for done in range(1, 4):
        run(node, batches[done - 1])
        assert hooks.calls == [done] * 6
        assert_weight_gradients(hooks.seen, golden(experts, batches[:done]).dw, PRECISE_BOUND)
    node.step()
    assert hooks.calls == [3] * 6, "step() fires nothing"


@pytest.mark.parametrize("flush", FLUSHES)
def test_hooks_fire_once_without_tokens_and_with_frozen_inputs(experts, flush):
    bind_main_grads(experts)
    hooks, node = Hooks(experts, lambda w: w.main_grad), make_node(experts, flush=flush)
    run(node, make_batch(0))
    assert hooks.calls == [1] * 6
    run(node, make_batch(), x_grad=False, probs_grad=False)
    assert hooks.calls == [2] * 6


def test_hooks_with_several_forwards_outstanding(experts):
    bind_main_grads(experts)
    batches = [make_batch(seed=s) for s in range(3)]
    hooks, node = Hooks(experts, lambda w: w.main_grad), make_node(experts, flush="auto")
    pending = [Pending(node, b) for b in batches]
    for done, waiting in enumerate(pending, 1):
        waiting.backward()
        assert hooks.calls == [done] * 6
        assert_weight_gradients(hooks.seen, golden(experts, batches[:done]).dw, PRECISE_BOUND)


def test_no_hook_for_frozen_experts(experts, batch):
    hooks = Hooks(experts, lambda w: None)
    for weight in weights_of(experts):
        weight.stop_gradient = True
    for flush in FLUSHES:
        run(make_node(experts, flush=flush), batch)
    assert hooks.calls == [0] * 6


def test_fused_parameters(batch):
    """Two stacked parameters, as Fleet's grouped experts hold them: same gradients, in place, hooks
    once.
    """
    from sonicmoe.ernie_compat import SonicMoEMlpNode

    experts = make_experts()
    wanted = golden(experts, [batch]).dw
    stacked = []
    for members in (weights_of(experts)[:3], weights_of(experts)[3:]):
        values = np.stack([numpy(w) for w in members]).astype("float32")
        made = paddle.create_parameter(list(values.shape), "float32")
        made.set_value(values)
        made.main_grad = paddle.zeros(values.shape, dtype="float32")
        stacked.append(made)
    kept, calls = [w.main_grad for w in stacked], []
    for weight in stacked:
        weight._register_backward_hook(lambda *_: calls.append(1))
    node = SonicMoEMlpNode.from_fused(*stacked, flush="auto")
    node(
        tensor(batch.x, grad=True), batch.counts, tensor(batch.indices), tensor(batch.probs)
    ).backward(tensor(batch.dout))
    assert calls == [1, 1]
    assert all(w.main_grad is k and w.grad is None for w, k in zip(stacked, kept, strict=True))
    gradients = [piece for main_grad in kept for piece in numpy(main_grad)]
    assert_weight_gradients(gradients, wanted, PRECISE_BOUND)
