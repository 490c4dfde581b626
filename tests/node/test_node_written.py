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
    FULL,
    Layer,
    no_room,
)

from sonicmoe.config import SonicMoEConfig
from sonicmoe.errors import ConfigError
from sonicmoe.gradients import sink

NAN = float("nan")
OVERWRITE = SonicMoEConfig(engine="reference", first_backward="overwrite")


def flag(weights, value=True):
    for weight in weights:
        weight.overwrite_main_grad = value


class TestFlag:
    """`overwrite_main_grad` is read at every backward, and rules alone."""

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


def written_first(problem=None, **options):
    """A layer whose first backward since `step()` writes, over NaN."""
    return Layer(problem, **{"config": OVERWRITE, "main_grad": NAN} | options)


class TestFirstBackward:
    """`first_backward="overwrite"`: nobody clears `main_grad` in these loops."""

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


class TestRefused:
    """tests/refusals/of_node.py has what else is refused by name."""

    def test_nothing_is_written(self):
        layer = written_first(main_grad=1.0)
        del layer.weights[2].main_grad
        words = r"writes main_grad, and experts\[2\].up_gate_proj.weight has none"
        with pytest.raises((ConfigError, OSError), match=words):
            layer.run()
        holds = [numpy(weight.main_grad) == 1.0 for weight in layer.weights[:2]]
        assert np.all(holds) and layer.weights[2].grad is None

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
