"""The guard of `step()`: traces that only forwards, or the number of backwards, can show. What shows
at a step itself is in test_node_step.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch
from weights.weight_sources import per_expert_source, weight_arrays

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import FlushMode
from sonicmoe.interop import requires_grad
from sonicmoe.node import step_guard
from sonicmoe.node.layer_state import LayerState
from sonicmoe.node.step_guard import StepGuard
from sonicmoe.weights import changes
from sonicmoe.weights.cache import Unannounced

ENGINE, SETTINGS = ReferenceEngine(), EngineSettings()


@pytest.fixture
def said(caplog):
    """Warnings of the package so far."""
    caplog.set_level(logging.INFO, logger="sonicmoe")
    yield lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    """A process asks once; every test is a process of its own in this respect."""
    monkeypatch.setattr(step_guard, "_asked", set())


def state_of(source, flush=FlushMode.STEP):
    return LayerState(source, flush, split_wgrad=False)


def backward(state):
    """Gradients of one backward, without an engine."""
    parameters = state.parameters.parameters()
    trained = list(map(requires_grad, parameters))
    dout = tensor(np.zeros(1), torch.float32)
    addition = state.begin_backward(ENGINE, SETTINGS, parameters, trained, dout)
    return state.end_backward(addition, parameters)


def double(weight):
    with torch.no_grad():
        weight.copy_(tensor(2 * numpy(weight), torch.float32).to(weight.dtype))


def test_weights_that_change_while_gradients_wait_are_named_once(said):
    source = per_expert_source(*weight_arrays())
    state = state_of(source)
    state.read_weights(ENGINE, SETTINGS)
    backward(state)
    for _ in range(2):
        double(source.parameters()[0])
        state.read_weights(ENGINE, SETTINGS)
    (line,) = said()
    assert "step() came too late or not at all: expert weights changed while gradients wait" in line
    assert "call node.step() right after the last backward" in line


def test_weights_that_change_while_none_wait_are_no_warning(said, caplog):
    source = per_expert_source(*weight_arrays())
    state = state_of(source)
    state.read_weights(ENGINE, SETTINGS)
    double(source.parameters()[0])
    for _ in range(2):  # said once
        state.read_weights(ENGINE, SETTINGS)
        double(source.parameters()[0])
    assert said() == []
    (record,) = caplog.records
    assert record.getMessage().startswith("expert weights changed without step()")


@pytest.mark.skipif(IS_PADDLE, reason="a hook of PyTorch's optimizers")
def test_an_optimizer_step_while_gradients_wait_is_named(said, monkeypatch):
    """On a GPU, where a fused optimizer writes weights without a trace."""
    monkeypatch.setattr(changes, "is_cuda", lambda tensor: True)
    state = state_of(per_expert_source(*weight_arrays()))
    state.read_weights(ENGINE, SETTINGS)
    backward(state)
    other = torch.nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    torch.optim.AdamW([other], fused=True).step()
    state.read_weights(ENGINE, SETTINGS)
    (line,) = said()
    assert "an optimizer stepped while gradients wait in the node" in line


def test_one_warning_for_all_traces(said):
    """A step that is forgotten shows in several ways, and each would be said."""
    source = per_expert_source(*weight_arrays())
    state = state_of(source)
    state.read_weights(ENGINE, SETTINGS)
    backward(state)
    double(source.parameters()[0])
    state.read_weights(ENGINE, SETTINGS)
    if IS_PADDLE:
        state.guard.note_write(Unannounced.OPTIMIZER_STEP)
    else:
        for weight in source.parameters():
            weight.grad = torch.ones_like(weight)
        torch.optim.SGD(source.parameters(), lr=0.1).step()
    for _ in range(StepGuard.FORGOTTEN_AFTER_BACKWARDS):
        state.guard.count_backward(0, sees_writes=False)
    state.flush()
    assert len(said()) == 1


class TestBackwardsWithoutStep:
    """Weights that get no gradient never move, so nothing else shows it."""

    def test_as_many_as_nobody_accumulates_are_named_once(self, said):
        guard = StepGuard(asks=False)
        for waiting in range(1, StepGuard.FORGOTTEN_AFTER_BACKWARDS):
            guard.count_backward(waiting, sees_writes=True)
        assert said() == []
        for waiting in range(StepGuard.FORGOTTEN_AFTER_BACKWARDS, 4000):
            guard.count_backward(waiting, sees_writes=True)
        (line,) = said()
        assert "1024 backward passes have run since node.step(); call node.step()" in line

    @pytest.mark.parametrize("sees_writes", [False, True])
    def test_complete_gradients_need_step_where_writes_leave_no_trace(self, said, sees_writes):
        """flush="backward": no gradient waits, and nothing but step() announces new weights."""
        guard = StepGuard(asks=False)
        for _ in range(StepGuard.FORGOTTEN_AFTER_BACKWARDS + 5):
            guard.count_backward(0, sees_writes)
        assert len(said()) == (0 if sees_writes else 1)

    def test_an_announcement_starts_the_count_anew(self, said):
        state = state_of(per_expert_source(*weight_arrays()), FlushMode.PROMPT)
        for _ in range(2):
            for _ in range(StepGuard.FORGOTTEN_AFTER_BACKWARDS - 1):
                state.guard.count_backward(0, sees_writes=False)
            state.end_step()
        state.guard.count_backward(0, sees_writes=False)
        assert said() == []

    def test_a_loop_that_never_calls_step_is_asked_after_a_few_backwards(self, said):
        """Every layer counts the same backwards, so one line serves them all."""
        guards = [StepGuard() for _ in range(3)]
        for waiting in range(1, 13):
            for guard in guards:
                guard.count_backward(waiting, sees_writes=True)
            assert len(said()) == (waiting >= 8)
        (line,) = said()
        assert line.startswith("8 backward passes have run, and node.step() was never called: ")
        assert "no optimizer gets them" in line and "right after the last backward" in line

    @pytest.mark.parametrize(("flush", "asked"), [("step", True), ("prompt", False)])
    def test_stale_weights_are_asked_about_where_the_loop_calls_step(self, said, flush, asked):
        """Nothing waits, and writes to the weights leave no trace. PaddleFleet announces them."""
        state = state_of(per_expert_source(*weight_arrays()), FlushMode(flush))
        for _ in range(12):
            state.guard.count_backward(0, sees_writes=False)
        assert [
            line for line in said() if "go on with the expert weights of the first" in line
        ] == said()
        assert len(said()) == asked

    def test_a_loop_that_accumulates_is_asked_where_it_goes_on_much_longer(self, said):
        guard = StepGuard()
        for _ in range(3):
            for waiting in range(1, 7):
                guard.count_backward(waiting, sees_writes=True)
            guard.end_step()
        for waiting in range(1, 24):
            guard.count_backward(waiting, sees_writes=True)
        assert said() == []
        guard.count_backward(24, sees_writes=True)
        assert "24 backward passes have run since node.step(): " in said()[0]

    def test_a_line_about_what_was_seen_is_not_followed_by_a_question(self, said):
        guard = StepGuard()
        guard.note_write(Unannounced.WRITE)
        for waiting in range(1, 13):
            guard.count_backward(waiting, sees_writes=True)
        assert len(said()) == 1

    def test_flush_backward_leaves_nothing_waiting(self):
        source = per_expert_source(*weight_arrays())
        for weight in source.parameters():
            weight.main_grad = tensor(np.zeros(tuple(weight.shape)), torch.float32)
        state = state_of(source, FlushMode.BACKWARD)
        assert backward(state) == [None] * len(source.parameters())
        assert state.gradients.waiting == 0
