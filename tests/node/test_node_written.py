"""Weight gradients that a backward writes into `main_grad` instead of adding them: where the memory
was made for it, where `overwrite_main_grad` asks for it, and where it is the first since `step()`.
Whatever was there before is NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import golden, make_problem
from framework import IS_PADDLE, numpy, relative_rmse
from node.node_harness import ARRANGEMENTS, Layer, problems, recomputed, want_gradient
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.targets import FreshTargets
from sonicmoe.errors import ConfigError
from sonicmoe.gradients import sink
from sonicmoe.node import questions

NAN = float("nan")
# Who leaves the gradients in `main_grad`: an engine that adds there, one that writes there, or a
# flush of a native buffer.
ENGINES = ("adds", "writes", "elsewhere")
each_engine = pytest.mark.parametrize("which", ENGINES)


@pytest.fixture
def engine(monkeypatch):
    """Make the reference engine one of `ENGINES`; what it returns lists the targets that were
    written.
    """
    adds, written = ReferenceEngine.backward_dw, []

    def writes(self, pending, targets):
        if isinstance(targets, FreshTargets):
            written.append(targets)
            for tensor in targets.tensors():
                tensor.zero_()
        adds(self, pending, targets)

    def choose(which):
        if which == "elsewhere":
            monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "the moon is full")
        if which == "writes":
            monkeypatch.setattr(ReferenceEngine, "writes_gradients", lambda *_: True)
            monkeypatch.setattr(ReferenceEngine, "backward_dw", writes)
        return written

    return choose


def flag(weights, value=True):
    for weight in weights:
        weight.overwrite_main_grad = value


def up_error(layer, *batches):
    """Of each expert's up-projection, how far its gradient is from the sum over these batches."""
    wanted = sum(golden(problem).dw1 for problem in batches)
    return [relative_rmse(*pair) for pair in zip(layer.gradients()[0], wanted, strict=True)]


class TestFlag:
    """`overwrite_main_grad` is read at every backward, and rules alone."""

    @pytest.mark.parametrize(("which", "arrangement"), pairwise(ENGINES, ARRANGEMENTS))
    def test_each_backward_writes_while_it_is_true(self, engine, which, arrangement):
        written, (first, second, third) = engine(which), problems(3)
        layer = Layer(first, arrangement=arrangement, main_grad=NAN)
        held = [weight.main_grad for weight in layer.weights]
        flag(layer.weights)
        layer.run(first)
        assert layer.error(first) < 1e-5
        layer.run(second)
        assert layer.error(second) < 1e-5
        flag(layer.weights, False)
        layer.step(third)
        assert layer.error(second, third) < 1e-5
        assert len(written) == (2 if which == "writes" else 0)
        for weight, memory in zip(layer.weights, held, strict=True):
            assert weight.main_grad is memory and weight.overwrite_main_grad is False

    @each_engine
    def test_weights_that_differ_in_it(self, engine, which):
        engine(which)
        first, second = problems(2)
        layer = Layer(first, main_grad=0.0)
        layer.run(first)
        flag(layer.weights[1:])
        layer.run(second)
        assert max(up_error(layer, second)[1:]) < 1e-5
        assert up_error(layer, first, second)[0] < 1e-5

    @pytest.mark.parametrize("which", ["adds", "elsewhere"])
    def test_a_weight_of_two_experts_gets_both_gradients(self, engine, which):
        """An engine that writes refuses memory that overlaps (`problem_of`)."""
        engine(which)
        problem = make_problem()
        for arrays in (problem.up_gate, problem.down):
            arrays[1] = arrays[0]
        layer = Layer(problem)
        layer.experts[1].up_gate_proj.weight = layer.weights[1] = layer.weights[0]
        layer.set_main_grad(NAN)
        flag(layer.weights)
        for _ in range(2):
            layer.run()
            wanted, got = golden(problem).dw1, numpy(layer.weights[0].main_grad)
            assert relative_rmse(got, wanted[0] + wanted[1]) < 1e-5

    @each_engine
    def test_frozen_weights_and_those_without_main_grad(self, engine, which):
        engine(which)
        layer = Layer(main_grad=NAN)
        flag(layer.weights)
        want_gradient(layer.weights[0], False)
        del layer.weights[2].main_grad
        layer.run()
        wanted = golden(layer.problem).dw1
        assert np.isnan(numpy(layer.weights[0].main_grad)).all()
        for weight, attribute, want in (
            (layer.weights[1], "main_grad", wanted[1]),
            (layer.weights[2], "grad", wanted[2]),
            (layer.weights[3], "main_grad", wanted[3]),
        ):
            assert relative_rmse(numpy(getattr(weight, attribute)), want) < 1e-5

    @each_engine
    @pytest.mark.parametrize("tokens", ["none", "none of them here"])
    def test_a_layer_that_no_token_reached_gets_zeros(self, engine, which, tokens):
        engine(which)
        problem = make_problem(tokens=0 if tokens == "none" else 5)
        problem.indices[:] = -1
        layer = Layer(problem, main_grad=NAN)
        flag(layer.weights)
        layer.run()
        assert not layer.has_gradients()

    @pytest.mark.parametrize("options", [{"flush": "step"}, {"split_wgrad": True}])
    def test_gradients_that_wait_cannot_be_written(self, options):
        layer = Layer(main_grad=1.0, **options)
        flag(layer.weights[:1])
        words = r"experts\[0\].up_gate_proj.weight.overwrite_main_grad is true.*flush='auto'"
        with pytest.raises((ConfigError, OSError), match=words):
            layer.run()
        flag(layer.weights[:1], False)
        layer.step()
        assert layer.error(held=1.0) < 1e-5

    @pytest.mark.parametrize("captured", [True, False])
    def test_a_graph_keeps_the_flag_that_it_was_captured_with(self, monkeypatch, captured):
        layer = Layer(main_grad=0.0)
        flag(layer.weights, captured)
        with monkeypatch.context() as patch:
            patch.setattr(sink, "is_capturing", lambda _: True)
            layer.run()
        layer.node.step()
        flag(layer.weights[1:2], not captured)
        with pytest.raises(RuntimeError, match="overwrite_main_grad of an expert weight changed"):
            layer.node.step()
        flag(layer.weights[1:2], captured)
        layer.node.step()

    def test_nobody_is_asked_to_clear_what_is_written(self, monkeypatch, caplog):
        monkeypatch.setattr(questions, "_asked", set())
        small = problems(1, hidden=8, intermediate=8)[0]
        layer = Layer(small, main_grad=NAN)
        flag(layer.weights)
        for _ in range(questions.STEPS + 2):
            layer.step()
        assert not questions._asked and layer.error() < 1e-5

    def test_recompute(self):
        layer = Layer(main_grad=NAN)
        flag(layer.weights)
        for _ in range(2):
            call = layer.call()
            call.out = recomputed(layer.node, *call.arguments, use_reentrant=IS_PADDLE)
            call.backward()
            assert layer.error() < 1e-5


@each_engine
def test_memory_that_is_made_is_written(engine, which):
    """An expert without tokens gets zeros, and later backwards add."""
    written, layer = engine(which), Layer(main_grad=None)
    for times in (1, 2):
        layer.run()
        assert layer.error(times=times) < 1e-5
    assert len(written) == (which == "writes")
    assert not numpy(layer.weights[2].main_grad).any()


@each_engine
def test_a_backward_that_found_no_memory_may_be_repeated(engine, which, monkeypatch):
    engine(which)
    layer = Layer(main_grad=NAN)
    flag(layer.weights)

    def fail(self, pending, targets):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceEngine, "backward_dw", fail)
        with pytest.raises((MemoryError, OSError), match="no room"):
            layer.run()
    layer.node.step()
    layer.step()
    assert layer.error() < 1e-5
