"""When gradients move: a `step()` that comes too late is named, and `split_wgrad` hands dx over
before dw is computed.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from node_harness import ARRANGEMENTS, Layer, make_problem, problems

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import ConfigError, LayoutError
from sonicmoe.node import step_guard
from sonicmoe.node.wgrad_queue import WgradQueue, tensors_in


@pytest.fixture
def said(caplog):
    """Lines about late steps."""
    logger = logging.getLogger("sonicmoe")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, "sonicmoe")
    yield lambda: [
        line for line in dict.fromkeys(caplog.messages) if "step() came too late" in line
    ]
    logger.removeHandler(caplog.handler)


def halve(layer):
    """What gradient accumulation does before the optimizer, in place."""
    with torch.no_grad():
        for weight in layer.weights:
            weight.main_grad.add_(weight.main_grad)


def replace(layer):
    """What delayed loss scaling does: a new tensor."""
    for weight in layer.weights:
        weight.main_grad = weight.main_grad * 0.5


def reduce_in_buffer(layer):
    """A reduction that goes behind the tensors' backs: bytes change, object and version stay."""
    for weight in layer.weights:
        weight.main_grad.numpy()[...] *= 2


def optimizer_step(layer):
    layer.overwrite(make_problem(seed=99))


LATE = {
    "in place": (halve, "reduced, scaled or replaced"),
    "rebound": (replace, "reduced, scaled or replaced"),
}
LATE["after the optimizer"] = (optimizer_step, "an optimizer changed the expert weights")
if not IS_PADDLE:  # whose numpy() is a copy
    LATE["inside a buffer"] = (reduce_in_buffer, "reduced, scaled or replaced")


@pytest.mark.parametrize("case", LATE)
def test_a_late_step_is_named_once(said, case):
    act, words = LATE[case]
    layer = Layer(flush="step")
    layer.set_main_grad(1.0)
    for _ in range(3):
        layer.run()
        act(layer)
        layer.node.step()
    assert len(said()) == 1
    assert words in said()[0] and "node.step() right after the last backward" in said()[0]
    assert "on_optimizer_begin" in said()[0] and "flush='auto'" in said()[0]


def test_a_late_step_of_plain_gradients_is_named(said):
    layer = Layer(flush="step")
    for _ in range(3):
        layer.run()
        for weight in layer.node._state.parameters.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5) if not IS_PADDLE else weight.grad.scale_(0.5)
        layer.node.step()
    assert len(said()) == 1 and "reduced, scaled or replaced" in said()[0]


def test_steps_in_time_say_nothing(said):
    """Several micro-batches, flushes between them, reduction and optimizer afterwards, main_grad
    created on the way.
    """
    for value in (0.0, 1.0, None):
        layer = Layer(flush="step")
        layer.set_main_grad(value)
        for _ in range(4):
            pending = [layer.call(problem) for problem in problems(3)]
            for call in pending:
                call.backward()
            layer.node.flush_grads()
            layer.run()
            layer.node.step()
            halve(layer)
            replace(layer)
            optimizer_step(layer)
            layer.node.step()
    layer = Layer(flush="backward")
    layer.set_main_grad(0.0)
    for _ in range(3):
        layer.run()
        halve(layer)
        layer.node.step()
    assert said() == []


def test_a_loop_that_never_calls_step_is_asked(caplog, monkeypatch):
    """`main_grad` stays None, so that no optimizer touches the experts and nothing ever changes."""
    monkeypatch.setattr(step_guard, "_asked", set())
    logger = logging.getLogger("sonicmoe")
    logger.addHandler(caplog.handler)
    layer = Layer(flush="step")
    layer.set_main_grad(None)
    for _ in range(12):
        layer.run()
    logger.removeHandler(caplog.handler)
    lines = [line for line in dict.fromkeys(caplog.messages) if "node.step()" in line]
    assert len(lines) == 1 and "node.step() was never called" in lines[0]
    assert all(weight.main_grad is None for weight in layer.weights)


def test_a_replaced_parameter_is_no_reduction(said):
    """Its gradients are not the new one's, which step() says; and the watch goes on after that."""
    layer = Layer(flush="step")
    layer.set_main_grad(0.0)
    call = layer.call(layer.problem)
    projection = layer.experts[0].down_proj
    old = projection.weight
    projection.weight = parameter(numpy(old), old.dtype)
    projection.weight.main_grad = None
    call.backward()
    with pytest.raises(RuntimeError, match="wait for 1 expert parameters that the modules held"):
        layer.node.step()
    layer.node.discard_grads()
    assert said() == [] and projection.weight.main_grad is None and not numpy(old.main_grad).any()
    for _ in range(2):
        layer.node.step()
        layer.run()
    projection.weight.main_grad = projection.weight.main_grad * 0.5
    layer.node.step()
    assert len(said()) == 1


def split_layer(problem=None, **options):
    """A layer whose node splits."""
    return Layer(problem, split_wgrad=True, **options)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_split_gives_the_same_bits(arrangement):
    batches = problems(3)
    whole, split = (
        Layer(batches[0], arrangement=arrangement),
        split_layer(batches[0], arrangement=arrangement),
    )
    for layer in (whole, split):
        layer.set_main_grad(0.0)
        calls = [layer.call(problem) for problem in batches]
        for call in calls:
            call.backward()
        layer.node.step()
        layer.results = [layer.result(call) for call in calls]
    for ours, theirs in zip(split.results, whole.results, strict=True):
        for (name, a), (_, b) in zip(ours.items(), theirs.items(), strict=True):
            assert np.array_equal(a, b), name


def test_dx_comes_first_and_dw_when_asked(monkeypatch):
    order = []
    for name in ("backward_dx", "backward_dw"):
        original = getattr(ReferenceEngine, name)
        monkeypatch.setattr(
            ReferenceEngine,
            name,
            lambda self, *a, _n=name, _o=original: (order.append(_n), _o(self, *a))[1],
        )
    layer = split_layer()
    main_grads = layer.set_main_grad(0.0)
    for _ in range(2):
        assert layer.run().dx is not None
    assert order == ["backward_dx"] * 2
    layer.node.finish_wgrad()
    assert order == ["backward_dx"] * 2 + ["backward_dw"] * 2
    assert not any(numpy(main_grad).any() for main_grad in main_grads), (
        "finish_wgrad() fills the accumulators only"
    )
    layer.node.step()
    assert any(numpy(main_grad).any() for main_grad in main_grads)
    assert len(order) == 4
    layer.node.step()
    assert len(order) == 4


def test_release_waits_for_what_was_put_off():
    layer = split_layer()
    layer.set_main_grad(0.0)
    layer.run()
    with pytest.raises(RuntimeError, match="never flushed"):
        layer.node.release_grads()
    layer.node.step()
    layer.node.release_grads()
    assert layer.node.gradient_bytes == 0


@pytest.mark.parametrize("split", [False, True])
def test_a_backward_that_fails_half_way_leaves_nothing_unseen(monkeypatch, split):
    """dw2 added, then out of memory: neither step() nor a release takes it for a gradient, and the
    node goes on after discard_grads().
    """
    layer, wanted = split_layer() if split else Layer(flush="step"), Layer()
    add = ReferenceEngine.backward_dw

    def fail(self, pending, accumulators):
        add(self, pending, accumulators)
        accumulators.dw1.zero_()
        accumulators.adding = True
        raise MemoryError("no room for dw1")

    for each in (layer, wanted):
        each.set_main_grad(0.0)
    layer.run()
    monkeypatch.setattr(ReferenceEngine, "backward_dw", fail)
    with pytest.raises(
        (MemoryError, OSError), match="no room for dw1"
    ):  # what Paddle makes of an error in a backward
        layer.run()
        layer.node.finish_wgrad()
    monkeypatch.setattr(ReferenceEngine, "backward_dw", add)
    for refused in (layer.node.step, layer.node.flush_grads):
        with pytest.raises(
            RuntimeError, match=r"left a part of them in the node; call node.discard_grads\(\)"
        ):
            refused()
    with pytest.raises(RuntimeError, match="discard_grads"):
        layer.node.release_grads()
    layer.node.discard_grads()
    layer.node.step()
    assert not any(gradient.any() for gradient in layer.gradients("main_grad"))
    for each in (layer, wanted):
        each.run()
        each.node.step()
    for ours, theirs in zip(
        layer.gradients("main_grad"), wanted.gradients("main_grad"), strict=True
    ):
        assert np.array_equal(ours, theirs)
    layer.node.release_grads()


@pytest.mark.parametrize("split", [False, True])
def test_discarded_gradients_never_arrive(said, split):
    layer = split_layer() if split else Layer(flush="step")
    layer.set_main_grad(0.0)
    for _ in range(2):
        layer.run()
    layer.node.discard_grads()
    halve(layer)
    layer.node.step()
    assert not any(gradient.any() for gradient in layer.gradients("main_grad")) and said() == []


@pytest.mark.skipif(IS_PADDLE, reason="a detached tensor of Paddle's counts its own writes only")
def test_tokens_overwritten_before_the_weight_gradients_are_refused():
    """A static input buffer, filled again while its weight gradients wait."""
    layer = split_layer()
    layer.set_main_grad(0.0)
    call = layer.run()
    with torch.no_grad():
        call.x.copy_(call.x * 2)
    with pytest.raises(RuntimeError, match="overwritten after backward"):
        layer.node.step()


@pytest.mark.parametrize("flush", ["backward", "direct"])
def test_split_refuses_gradients_that_must_be_complete_after_a_backward(flush):
    with pytest.raises(
        ConfigError, match=f"split_wgrad with flush='{flush}'.*needed: flush='step'"
    ):
        SonicMoEMlpNode.from_fused(
            *Layer(arrangement="fused").weights, flush=flush, split_wgrad=True
        )


def test_frozen_weights_leave_nothing_to_put_off(monkeypatch):
    layer = split_layer()
    for weight in layer.weights:
        if IS_PADDLE:
            weight.stop_gradient = True
        else:
            weight.requires_grad_(False)
    submitted = []
    monkeypatch.setattr(WgradQueue, "submit", lambda *arguments: submitted.append(arguments))
    assert layer.run().dx is not None and submitted == []


def test_every_tensor_of_the_operands_is_found():
    from dataclasses import dataclass

    @dataclass
    class Operand:
        codes: object
        name: str

    a, b, c = (tensor(np.zeros(n, np.float32)) for n in (1, 2, 3))
    found = list(tensors_in([Operand((a, None), "x"), {"no": b}, Operand(c, "y")]))
    assert [int(t.shape[0]) for t in found] == [1, 3]


def test_a_bias_is_refused_and_not_forgotten():
    layer = Layer()
    layer.experts[1].down_proj.bias = layer.weights[0]
    with pytest.raises(LayoutError, match=r"experts\[1\].down_proj has a bias"):
        p = layer.problem
        SonicMoEMlpNode(layer.experts, p.num_experts, p.x.shape[1], p.intermediate, p.activation)
