"""Weight gradients that a backward writes into `main_grad` instead of adding them: where the memory
was made for it, where `overwrite_main_grad` asks for it, and where it is the first since `step()`.
Whatever was there before is NaN.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from engine.moe_golden import golden, make_problem
from framework import numpy, relative_rmse, tensor, torch
from node.node_harness import (
    ARRANGEMENTS,
    FLUSHES,
    FULL,
    Layer,
    gradients_of,
    no_room,
    problems,
    want_gradient,
)
from pairwise import pairwise

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.interface import GradientMode
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.errors import ConfigError
from sonicmoe.gradients import sink

NAN = float("nan")
OVERWRITE = SonicMoEConfig(engine="reference", first_backward="overwrite")
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
        if targets.mode is GradientMode.FRESH:
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

    @pytest.mark.parametrize("value", [NAN, None], ids=["flagged", "made"])
    @pytest.mark.parametrize("which", ["adds", "elsewhere"])
    def test_a_weight_of_two_experts_gets_both_gradients(self, engine, which, value):
        """An engine that writes refuses memory that overlaps (`problem_of`). Memory that is made in
        the first backward is added to by the second.
        """
        engine(which)
        problem = make_problem()
        for arrays in (problem.up_gate, problem.down):
            arrays[1] = arrays[0]
        layer = Layer(problem)
        layer.experts[1].up_gate_proj.weight = layer.weights[1] = layer.weights[0]
        layer.set_main_grad(value)
        flag(layer.weights, value is NAN)
        for backwards in (1, 2):
            layer.run()
            wanted, got = golden(problem).dw1, numpy(layer.weights[0].main_grad)
            times = 1 if value is NAN else backwards
            assert relative_rmse(got, times * (wanted[0] + wanted[1])) < 1e-5

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

    def test_gradients_that_wait_cannot_be_written(self):
        layer = Layer(main_grad=1.0, flush="step")
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
def test_a_backward_that_found_no_memory_may_be_repeated(engine, which):
    engine(which)
    layer = Layer(main_grad=NAN)
    flag(layer.weights)

    with no_room():
        layer.run()
    layer.node.step()
    layer.step()
    assert layer.error() < 1e-5


def written_first(problem=None, **options):
    """A layer whose first backward since `step()` writes, over NaN."""
    return Layer(problem, **{"config": OVERWRITE, "main_grad": NAN} | options)


def holds(weight, value):
    return np.array_equal(numpy(weight.main_grad), np.full(tuple(weight.shape), value))


class TestFirstBackward:
    """`first_backward="overwrite"`: nobody clears `main_grad` in these loops."""

    @pytest.mark.parametrize(("which", "arrangement"), pairwise(ENGINES, ARRANGEMENTS))
    def test_the_first_writes_and_the_others_add(self, engine, which, arrangement):
        written, batches = engine(which), problems(3)
        layer = written_first(batches[0], arrangement=arrangement)
        held = [weight.main_grad for weight in layer.weights]
        for step in range(3):
            layer.step(*batches)
            assert layer.error(*batches) < 1e-5
            assert len(written) == (step + 1 if which == "writes" else 0)
        assert all(w.main_grad is m for w, m in zip(layer.weights, held, strict=True))

    @pytest.mark.parametrize(
        ("which", "options"),
        [
            *((which, {"config": OVERWRITE, "main_grad": NAN}) for which in ENGINES),
            *(("adds", {"flush": flush, "main_grad": 0.0}) for flush in FLUSHES),
        ],
        ids=str,
    )
    def test_each_gradient_has_its_own_first_backward(self, engine, which, options):
        """Expert 0 trains in the first micro-batch only, expert 1 in the second only; also where
        backwards add, to memory that is cleared for every step.
        """
        engine(which)
        first, second = problems(2)
        layer = Layer(first, **options)
        for step in range(2):
            if "config" not in options:
                layer.zero_main_grad()
            for batch, frozen in ((first, 1), (second, 0)):
                want_gradient(layer.weights[frozen], False)
                layer.run(batch)
                want_gradient(layer.weights[frozen], True)
            layer.node.step()
            one, two = golden(first).dw1, golden(second).dw1
            wanted = [one[0], two[1], *(one + two)[2:]]
            for got, want in zip(layer.gradients()[0], wanted, strict=True):
                assert relative_rmse(got, want) < 1e-5, step

    def test_a_skipped_batch_leaves_nothing(self):
        good, bad = problems(2)
        layer = written_first(good)
        layer.run(bad.but(dout=np.full_like(bad.dout, np.nan)))
        layer.node.discard_grads()
        layer.step(good)
        assert layer.error(good) < 1e-5

    def test_a_backward_that_failed_half_way(self):
        layer = written_first()
        with no_room(half_way=True):
            layer.run()
        with pytest.raises(RuntimeError, match="left a part of them in main_grad"):
            layer.node.step()
        layer.node.discard_grads()
        layer.step()
        assert layer.error() < 1e-5

    def test_a_copy_counts_for_itself(self):
        layer = written_first()
        layer.run()
        other = copy.deepcopy(layer.node)
        weights, call = other._state.parameters.parameters(), layer.call()
        for weight in weights:
            weight.main_grad = tensor(np.full(tuple(weight.shape), NAN), torch.float32)
        other(*call.arguments).backward(call.dout)
        other.step()
        layer.step()
        assert layer.error(times=2) < 1e-5
        assert relative_rmse(numpy(weights[0].main_grad), golden(layer.problem).dw1[0]) < 1e-5


class TestStepZeroes:
    """What no backward since the last step has written, if one came."""

    def test_frozen_weights(self):
        layer = written_first()
        frozen = layer.weights[1]
        want_gradient(frozen, False)
        layer.run()
        assert np.isnan(numpy(frozen.main_grad)).all()
        layer.node.step()
        assert holds(frozen, 0.0) and up_error(layer, layer.problem)[0] < 1e-5
        layer.set_main_grad(3.0)
        for _ in range(2):  # idempotent, and steps without a backward
            layer.node.step()
        assert all(holds(weight, 3.0) for weight in layer.weights)

    def test_after_a_backward_to_the_tokens_alone(self):
        layer = written_first()
        call = layer.call()
        gradients_of(call, [call.x])
        layer.node.step()
        assert all(holds(weight, 0.0) for weight in layer.weights)

    def test_never_in_the_adding_way(self):
        layer = Layer(main_grad=3.0)
        want_gradient(layer.weights[1], False)
        layer.step()
        assert holds(layer.weights[1], 3.0)


class TestRefused:
    """By name, and nothing is written."""

    def test_gradients_that_wait(self):
        words = "first_backward='overwrite' with flush='step'"
        with pytest.raises(ConfigError, match=words):
            written_first(flush="step")
        layer = Layer(main_grad=1.0, config=None, flush="step")
        with OVERWRITE.activate():
            call = layer.call()
        with pytest.raises((ConfigError, OSError), match=words):
            call.backward()
        assert all(holds(weight, 1.0) for weight in layer.weights)

    def test_a_weight_without_main_grad(self):
        layer = written_first(main_grad=1.0)
        del layer.weights[2].main_grad
        words = r"writes main_grad, and experts\[2\].up_gate_proj.weight has none"
        with pytest.raises((ConfigError, OSError), match=words):
            layer.run()
        assert holds(layer.weights[0], 1.0) and layer.weights[2].grad is None

    @pytest.mark.parametrize("config", [OVERWRITE, FULL])
    def test_a_parameter_of_another_node(self, config):
        layer = written_first()
        layer.run()
        other = layer.another_node(config=config)
        words = r"experts\[0\].up_gate_proj.weight is a parameter of another node too"
        call = layer.call()
        with pytest.raises((ConfigError, OSError), match=words):
            other(*call.arguments).backward(call.dout)
        layer.node.step()
        assert layer.error() < 1e-5

    def test_not_after_that_node_is_gone(self):
        layer = written_first()
        layer.step()
        layer.node = layer.another_node()
        layer.step()
        assert layer.error() < 1e-5

    def test_a_capture(self, monkeypatch):
        layer = written_first(main_grad=1.0)
        monkeypatch.setattr(sink, "is_capturing", lambda _: True)
        with pytest.raises((ConfigError, OSError), match="while a backward is captured"):
            layer.run()
        assert all(holds(weight, 1.0) for weight in layer.weights)

    def test_two_settings_between_two_steps(self):
        layer = Layer(config=None, main_grad=0.0)
        with FULL.activate():
            layer.run()
        with OVERWRITE.activate():
            call = layer.call()
        with pytest.raises((ConfigError, OSError), match="first_backward is 'overwrite' in this"):
            call.backward()
        layer.node.step()
        call.backward()
        assert layer.error() < 1e-5
