"""Weight gradients that go straight into `main_grad`, and what decides that they do."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
from engine.moe_golden import golden, make_problem
from framework import IS_PADDLE, numpy, parameter, relative_rmse, tensor, torch
from node_harness import ARRANGEMENTS, FP8, Layer, problems, want_gradient

from sonicmoe.engine import targets as engine_targets
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.gradients import places, sink
from sonicmoe.interop import data_ptr

each_arrangement = pytest.mark.parametrize("arrangement", ARRANGEMENTS)


@pytest.fixture
def said(caplog, monkeypatch):
    """Lines about gradients, with their level."""
    caplog.set_level(logging.INFO, "sonicmoe")
    monkeypatch.setattr(sink, "_said", set())
    yield lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "weight gradients" in record.getMessage()
    ]


def zeroed(layer):
    """What the optimizer of a framework does with fp32 gradients."""
    with torch.no_grad():
        for weight in layer.weights:
            weight.main_grad.zero_()


def assert_same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


class TestDirect:
    @each_arrangement
    @pytest.mark.parametrize("config", [None, FP8], ids=["full", "fp8"])
    def test_has_the_bits_of_accumulate_then_flush(self, arrangement, config):
        options = {} if config is None else {"config": config}
        layers = [Layer(arrangement=arrangement, flush=f, **options) for f in ("auto", "step")]
        for layer in layers:
            layer.set_main_grad(0.0)
            layer.run()
            layer.node.step()
        assert_same_bits(*(layer.gradients("main_grad") for layer in layers))

    @each_arrangement
    def test_memory_that_did_not_move_is_not_asked_about_again(self, arrangement, monkeypatch):
        layer, asked = Layer(arrangement=arrangement, flush="auto"), []
        misfit = engine_targets.misfit
        monkeypatch.setattr(engine_targets, "misfit", lambda *of: asked.append(1) or misfit(*of))
        held = layer.set_main_grad(0.0)
        layer.run()
        first = len(asked)
        layer.run()
        assert first == len(asked) == len(held)
        layer.weights[-1].main_grad = torch.zeros_like(held[-1])
        layer.run()
        assert len(asked) == 2 * first
        copy.deepcopy(layer.node)
        layer.weights[-1].main_grad = held[-1].to(torch.bfloat16)
        with pytest.raises(OSError if IS_PADDLE else DTypeError, match="main_grad is bfloat16"):
            layer.run()

    @each_arrangement
    def test_several_micro_batches_are_summed_where_they_lie(self, arrangement):
        batches = problems(3)
        layer = Layer(batches[0], arrangement=arrangement, flush="auto")
        held = layer.set_main_grad(0.25)
        places = [data_ptr(each) for each in held]
        calls = [layer.call(problem) for problem in batches]
        for call in reversed(calls):
            call.backward()
        before_step = layer.gradients("main_grad")
        assert layer.node.gradient_bytes == 0
        layer.node.step()
        assert_same_bits(before_step, layer.gradients("main_grad"))
        assert all(w.main_grad is h for w, h in zip(layer.weights, held, strict=True))
        assert [data_ptr(each) for each in held] == places
        for got, name in zip(before_step, ("dw1", "dw2"), strict=True):
            want = 0.25 + sum(getattr(golden(problem), name) for problem in batches)
            assert relative_rmse(got, want) < 1e-5

    def test_memory_stays_unbound_where_the_backward_fails(self, monkeypatch):
        layer = Layer(flush="auto")
        layer.set_main_grad(None)

        def fail(self, pending, targets):
            raise MemoryError("no room")

        monkeypatch.setattr(ReferenceEngine, "backward_dw", fail)
        with pytest.raises((MemoryError, OSError), match="no room"):
            layer.run()
        assert all(weight.main_grad is None for weight in layer.weights)
        layer.node.step()

    def test_a_parameter_of_two_experts_gets_both_gradients(self):
        problem = make_problem()
        for arrays in (problem.up_gate, problem.down):
            arrays[1] = arrays[0]
        layer = Layer(problem, flush="auto")
        layer.experts[1].up_gate_proj.weight = layer.experts[0].up_gate_proj.weight
        layer.weights[1] = layer.weights[0]
        layer.set_main_grad(None)
        layer.run()
        wanted = golden(problem).dw1
        got = numpy(layer.weights[0].main_grad)
        assert relative_rmse(got, wanted[0] + wanted[1]) < 1e-5

    def test_two_nodes_over_the_same_experts(self):
        """Stacked layers that share their experts, and both are in one backward."""
        layer = Layer(flush="auto")
        layer.set_main_grad(0.0)
        p = layer.problem
        other = SonicMoEMlpNode(
            layer.experts, p.num_experts, p.x.shape[1], p.intermediate, p.activation, config=FP8
        )
        first = layer.call()
        second = other(first.out, None, first.indices, first.probs)
        second.backward(first.dout)
        once = layer.gradients("main_grad")
        for node in (layer.node, other):
            node.step()
        assert_same_bits(once, layer.gradients("main_grad"))
        apart = Layer(flush="step")
        apart.set_main_grad(0.0)
        apart_other = SonicMoEMlpNode(
            apart.experts,
            p.num_experts,
            p.x.shape[1],
            p.intermediate,
            p.activation,
            config=FP8,
            flush="step",
        )
        first = apart.call()
        apart_other(first.out, None, first.indices, first.probs).backward(first.dout)
        for node in (apart_other, apart.node):
            node.step()
        for got, want in zip(once, apart.gradients("main_grad"), strict=True):
            assert relative_rmse(got, want) < 1e-6

    def test_a_part_of_a_backward_is_refused_until_it_is_dropped(self, monkeypatch):
        layer, add = Layer(flush="auto"), ReferenceEngine.backward_dw

        def fail(self, pending, targets):
            add(self, pending, targets)
            targets.adding = True
            raise MemoryError("no room for dw1")

        layer.set_main_grad(0.0)
        monkeypatch.setattr(ReferenceEngine, "backward_dw", fail)
        with pytest.raises((MemoryError, OSError), match="no room for dw1"):
            layer.run()
        monkeypatch.setattr(ReferenceEngine, "backward_dw", add)
        for refused in (layer.node.step, layer.node.flush_grads):
            with pytest.raises(
                RuntimeError, match="left a part of them in main_grad; zero main_grad"
            ):
                refused()
        layer.node.discard_grads()
        zeroed(layer)
        layer.run()
        layer.node.step()
        assert relative_rmse(layer.gradients("main_grad")[0], golden(layer.problem).dw1) < 1e-5


class TestWhatDecides:
    def test_direct_is_said_once(self, said):
        layer = Layer()
        layer.set_main_grad(0.0)
        for _ in range(3):
            layer.run()
            layer.node.step()
        assert said() == [("INFO", "expert weight gradients are added straight into main_grad")]

    def test_without_main_grad_they_go_through_autograd(self, said):
        layer = Layer()
        for _ in range(2):
            layer.run()
            assert layer.node.gradient_bytes == 0
        ((level, line),) = said()
        assert level == "INFO" and "through autograd where there is no main_grad" in line
        for got, want in zip(
            layer.gradients("grad"),
            (golden(layer.problem).dw1, golden(layer.problem).dw2),
            strict=True,
        ):
            assert relative_rmse(got, 2 * want) < 1e-5

    def test_an_engine_that_cannot_add_there_is_named(self, said, monkeypatch):
        monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "the moon is full")
        layer = Layer()
        layer.set_main_grad(0.0)
        for times in (1, 2):
            layer.run()
            dw1 = layer.gradients("main_grad")[0]
            assert relative_rmse(dw1, times * golden(layer.problem).dw1) < 1e-5
            assert layer.node.gradient_bytes == 0
        ((level, line),) = said()
        assert level == "INFO"
        assert "handed over by every backward" in line and line.endswith(": the moon is full")

    def test_an_engine_is_asked_again_where_memory_or_the_engine_is_another(self, monkeypatch):
        asked = []
        monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *about: asked.append(about))
        layer = Layer()
        layer.set_main_grad(0.0)
        for _ in range(2):
            layer.run()
        assert len(asked) == 1
        layer.set_main_grad(0.0)
        layer.run()
        assert len(asked) == 2
        monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "the moon is full")
        layer.set_main_grad(0.0)
        layer.run()
        assert relative_rmse(layer.gradients("main_grad")[0], golden(layer.problem).dw1) < 1e-5

    @pytest.mark.parametrize("value", [0.0, None])
    def test_one_without_main_grad_goes_through_autograd_alone(self, value):
        layer = Layer()
        layer.set_main_grad(value)
        del layer.weights[2].main_grad
        layer.run()
        wanted = [*golden(layer.problem).dw1, *golden(layer.problem).dw2]
        for index, (weight, want) in enumerate(zip(layer.weights, wanted, strict=True)):
            got = weight.grad if index == 2 else weight.main_grad
            assert relative_rmse(numpy(got), want) < 1e-5
            assert index == 2 or weight.grad is None

    @pytest.mark.parametrize("flush", ["auto", "step"])
    @pytest.mark.parametrize(
        ("arrangement", "name"),
        [
            ("per_expert", r"experts\[3\].down_proj.weight"),
            ("fused", "weight2"),
            ("native", "weight2"),
        ],
    )
    def test_a_main_grad_that_nothing_can_be_added_to_is_refused(self, arrangement, name, flush):
        layer = Layer(arrangement=arrangement, flush=flush)
        for wrong, error, words in (
            (torch.bfloat16, DTypeError, f"{name}.main_grad is bfloat16; needed: float32"),
            (torch.int32, DTypeError, f"{name}.main_grad is int32; needed: float32"),
            (None, ShapeError, f"{name}.main_grad has shape"),
        ):
            held = layer.set_main_grad(0.0)[-1]
            layer.weights[-1].main_grad = held[:-1] if wrong is None else held.to(wrong)
            with pytest.raises((error, OSError), match=words):
                layer.run()
            layer.weights[-1].main_grad = held
            assert not any(each.any() for each in layer.gradients("main_grad"))

    @pytest.mark.parametrize("flush", ["auto", "step"])
    def test_what_trains_is_decided_in_the_backward(self, flush):
        """Expert 0 trains in the first micro-batch only, expert 1 in the second only."""
        first, second = problems(2)
        layer = Layer(first, flush=flush)
        layer.set_main_grad(0.0)
        up = layer.weights
        want_gradient(up[1], False)
        layer.run(first)
        want_gradient(up[0], False)
        want_gradient(up[1], True)
        layer.run(second)
        want_gradient(up[0], True)
        want_gradient(up[1], False)
        layer.node.step()
        one, two = golden(first).dw1, golden(second).dw1
        wanted = [one[0], two[1], *(one + two)[2:]]
        for got, want in zip(layer.gradients("main_grad")[0], wanted, strict=True):
            assert relative_rmse(got, want) < 1e-5


class TestCaptures:
    """A CUDA graph adds to the memory that it was captured with."""

    @pytest.fixture
    def capture(self, monkeypatch):
        def switch(on):
            monkeypatch.setattr(sink, "is_capturing", lambda _: on)

        return switch

    def test_memory_is_kept_and_its_replacement_refused(self, capture):
        layer = Layer(flush="auto")
        held = layer.set_main_grad(0.0)
        capture(True)
        layer.run()
        capture(False)
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

    def test_memory_is_not_made_in_a_capture(self, capture):
        layer = Layer(flush="auto")
        layer.set_main_grad(None)
        capture(True)
        with pytest.raises((RuntimeError, OSError), match="main_grad allocated before the capture"):
            layer.run()

    def test_a_copy_was_not_captured(self, capture):
        held = places.CapturedMemory()
        weight = parameter(np.zeros((2, 2), np.float32), torch.float32)
        weight.main_grad = tensor(np.zeros((2, 2)), torch.float32)
        held.keep([weight], [True])
        weight.main_grad = None
        copy.deepcopy(held).check()
        with pytest.raises(RuntimeError, match="replaced"):
            held.check()


@pytest.mark.skipif(IS_PADDLE, reason="PyTorch's hooks, and Megatron's attribute")
class TestHooks:
    @pytest.mark.parametrize("adds", [True, False], ids=["direct", "flushed"])
    def test_fire_once_with_complete_gradients(self, adds, monkeypatch):
        if not adds:
            monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "for a test")
        layer = Layer()
        layer.set_main_grad(0.0)
        wanted = Layer(flush="step")
        wanted.set_main_grad(0.0)
        wanted.run()
        wanted.node.step()
        seen = []
        for index, weight in enumerate(layer.weights):
            accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]

            def look(*_, weight=weight, index=index):
                seen.append((index, weight.main_grad.clone()))

            layer.hooks = [
                *getattr(layer, "hooks", []),
                accumulator.register_hook(look),
                weight.register_post_accumulate_grad_hook(look),
                accumulator,
            ]
        layer.run()
        assert sorted(index for index, _ in seen) == sorted([*range(8), *range(8)])
        for index, gradient in seen:
            assert torch.equal(gradient, wanted.weights[index].main_grad)

    def test_one_that_raises_leaves_the_gradient_where_it_is(self):
        layer = Layer()
        layer.set_main_grad(0.0)

        def refuse(_):
            raise ValueError("not now")

        handle = layer.weights[-1].register_post_accumulate_grad_hook(refuse)
        with pytest.raises(ValueError, match="not now"):
            layer.run()
        handle.remove()
        once = layer.gradients("main_grad")
        layer.node.step()
        assert_same_bits(once, layer.gradients("main_grad"))
        assert relative_rmse(once[0], golden(layer.problem).dw1) < 1e-5

    @pytest.mark.parametrize("adds", [True, False], ids=["direct", "flushed"])
    def test_megatron_is_told_where_the_gradient_is(self, adds, monkeypatch):
        """Its hook: a `.grad` must be there, and is added only where it is not in main_grad yet."""
        if not adds:
            monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "for a test")
        layer = Layer()
        layer.set_main_grad(0.0)
        for weight in layer.weights:
            weight.grad_added_to_main_grad = False

            def reduce(weight=weight):
                assert weight.grad is not None
                if not weight.grad_added_to_main_grad:
                    weight.main_grad.add_(weight.grad)
                weight.grad = None

            weight.register_post_accumulate_grad_hook(lambda _, reduce=reduce: reduce())
        layer.run()
        assert all(
            weight.grad_added_to_main_grad and weight.grad is None for weight in layer.weights
        )
        wanted = golden(layer.problem)
        for got, want in zip(layer.gradients("main_grad"), (wanted.dw1, wanted.dw2), strict=True):
            assert relative_rmse(got, want) < 1e-5
