"""Weight gradients go straight into `main_grad` where its memory allows that. Experts without a row in a batch
have gradients of zeros, or none where that is asked for.
"""

from __future__ import annotations

import copy
import logging
import re

import numpy as np
import pytest
from engine.moe_golden import golden
from framework import IS_PADDLE, numpy, parameter, relative_rmse, tensor, torch
from node.node_harness import FLUSHES, Layer, no_room
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.errors import DeviceError, DTypeError, LayoutError, ShapeError
from sonicmoe.gradients import sink, waiting


@pytest.fixture
def said(caplog):
    """Lines about gradients, with their level."""
    caplog.set_level(logging.INFO, "sonicmoe")
    yield lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "weight gradients" in record.getMessage()
    ]


def freed(_, held):
    made = held.clone()
    made.untyped_storage().resize_(0)
    return made


LAST_WEIGHT = {
    "per_expert": r"experts\[3\].down_proj.weight",
    "fused": "weight2",
    "native": "weight2",
}
# The error, its words behind the weight's name, and what a weight gets in place of its `main_grad`.
WRONG = {
    "bf16": (
        DTypeError,
        ".main_grad is bfloat16; needed: float32",
        lambda _, h: h.to(torch.bfloat16),
    ),
    "int32": (DTypeError, ".main_grad is int32; needed: float32", lambda _, h: h.to(torch.int32)),
    "shape": (ShapeError, ".main_grad has shape", lambda _, h: h[:-1]),
    "own": (LayoutError, ".main_grad is the memory of the weight itself", lambda w, _: w.detach()),
}
if not IS_PADDLE:
    WRONG["device"] = DeviceError, ".main_grad is on meta", lambda _, held: held.to("meta")
    words = r".main_grad has strides \(.*\), under which its elements overlap"
    WRONG["overlap"] = LayoutError, words, lambda _, held: held[..., :1].expand_as(held)
    WRONG["freed"] = LayoutError, ".main_grad has no memory: it was freed", freed


class TestWhatDecides:
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("absent", "through autograd where there is no main_grad"),
            (0.0, "handed over by every backward.*: the moon is full$"),
        ],
    )
    def test_why_they_go_through_autograd_is_said_once(self, value, words, said, monkeypatch):
        """An engine that cannot add there is named."""
        monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "the moon is full")
        layer, attribute = Layer(main_grad=value), "grad" if value == "absent" else "main_grad"
        for times in (1, 2):
            layer.run()
            assert layer.error(times=times, attribute=attribute) < 1e-5
            assert layer.node.gradient_bytes == 0
        ((level, line),) = said()
        assert level == "INFO" and re.search(words, line)

    def test_memory_stays_unbound_where_the_backward_fails(self):
        layer = Layer(main_grad=None)
        with no_room():
            layer.run()
        assert all(weight.main_grad is None for weight in layer.weights)
        layer.node.step()

    @pytest.mark.parametrize("value", [0.0, None])
    def test_one_without_main_grad_goes_through_autograd_alone(self, value):
        layer = Layer(main_grad=value)
        del layer.weights[2].main_grad
        layer.run()
        wanted = [*golden(layer.problem).dw1, *golden(layer.problem).dw2]
        for index, (weight, want) in enumerate(zip(layer.weights, wanted, strict=True)):
            got = weight.grad if index == 2 else weight.main_grad
            assert relative_rmse(numpy(got), want) < 1e-5
            assert index == 2 or weight.grad is None

    @pytest.mark.parametrize(
        ("wrong", "arrangement", "flush"), pairwise(WRONG, LAST_WEIGHT, FLUSHES)
    )
    def test_a_main_grad_that_nothing_can_be_added_to_is_refused(self, wrong, arrangement, flush):
        """The refusal also comes where it replaces one that was added to."""
        layer = Layer(arrangement=arrangement, flush=flush, main_grad=0.0)
        layer.step()
        layer.zero_main_grad()
        error, words, make = WRONG[wrong]
        weight = layer.weights[-1]
        held = weight.main_grad
        weight.main_grad, before = make(weight, held), numpy(weight)
        with pytest.raises((error, OSError), match=LAST_WEIGHT[arrangement] + words):
            layer.run()
        weight.main_grad = held
        assert not layer.has_gradients() and np.array_equal(numpy(weight), before)


class TestCaptures:
    """A CUDA graph adds to the memory that it was captured with."""

    def test_memory_is_kept_and_its_replacement_refused(self, monkeypatch):
        layer = Layer()
        held = layer.set_main_grad(0.0)
        with monkeypatch.context() as patch:
            patch.setattr(sink, "is_capturing", lambda _: True)
            layer.run()
        layer.node.step()
        layer.weights[1].main_grad = tensor(numpy(held[1]), torch.float32)
        with pytest.raises(RuntimeError, match="main_grad of an expert weight was replaced after"):
            layer.node.step()
        layer.weights[1].main_grad = held[1]
        layer.node.step()
        layer.weights[1].main_grad = None
        with pytest.raises(RuntimeError, match="another capture"):
            layer.node.step()
        layer.node.release_grads()
        layer.node.step()

    def test_a_copy_was_not_captured(self):
        held = waiting.CapturedMemory()
        weight = parameter(np.zeros((2, 2), np.float32), torch.float32)
        weight.main_grad = tensor(np.zeros((2, 2)), torch.float32)
        held.keep([weight], [True])
        weight.main_grad = None
        copy.deepcopy(held).check()
        with pytest.raises(RuntimeError, match="replaced"):
            held.check()


@pytest.mark.skipif(IS_PADDLE, reason="modules and optimizers of PyTorch")
@pytest.mark.parametrize("counts", ["list", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_idle_experts_have_none_as_in_a_loop_over_the_others(shared, counts):
    """No optimizer decays them then. A weight that a busy expert shares has its gradient."""
    idle_expert = 2  # of which no token is
    layers = [Layer(idle_grads=asked) for asked in (False, True)]
    for layer in layers:
        if shared:
            layer.experts[idle_expert].down_proj = layer.experts[0].down_proj
            layer.weights[4 + idle_expert] = layer.weights[4]
        layer.run(counts=counts)
    none, zeros = layers
    idle = [index for index, weight in enumerate(none.weights) if weight.grad is None]
    assert idle == ([idle_expert] if shared else [idle_expert, 4 + idle_expert])
    assert not any(numpy(zeros.weights[index].grad).any() for index in idle)
    for index, weight in enumerate(none.weights):
        none.weights[index].grad = zeros.weights[index].grad if weight.grad is None else weight.grad
    assert shared or none.error(attribute="grad") < 1e-5
    assert all((a.grad == b.grad).all() for a, b in zip(none.weights, zeros.weights, strict=True))
