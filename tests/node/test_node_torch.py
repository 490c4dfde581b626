"""The node as a PyTorch citizen: hooks, checkpointing, graphs run twice, memory, autocast."""

from __future__ import annotations

import weakref

import pytest
from engine.moe_golden import assert_same_bits, make_problem
from framework import IS_PADDLE, torch
from node.node_harness import (
    FP8,
    Layer,
    assert_equal,
    problems,
)

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine import reference
from sonicmoe.ep import LocalDispatcher

if IS_PADDLE:
    pytest.skip("what only PyTorch has; tests/paddle has Paddle's", allow_module_level=True)

STAGEWISE = SonicMoEConfig(engine="reference", fp8_mode="mem")


class TestHooks:
    """Hooks of a weight are where communication overlap starts; the oracle has when they fire."""

    def test_those_of_nodes_in_the_graph_fire_once_with_the_gradient_complete(self, engine):
        engine("elsewhere")
        layer, fired = Layer(main_grad=0.0), {}
        nodes = [weight.expand_as(weight).grad_fn.next_functions[0][0] for weight in layer.weights]
        for node, weight in zip(nodes, layer.weights, strict=True):

            def look(*_, weight=weight):
                assert weight not in fired
                fired[weight] = weight.main_grad.clone()

            node.register_hook(look)
        layer.step()
        assert len(fired) == len(layer.weights)
        assert all(torch.equal(seen, weight.main_grad) for weight, seen in fired.items())

    def test_one_that_raises_leaves_the_gradient_where_it_is(self):
        layer = Layer(main_grad=0.0)

        def refuse(_):
            raise ValueError("not now")

        handle = layer.weights[-1].register_post_accumulate_grad_hook(refuse)
        with pytest.raises(ValueError, match="not now"):
            layer.run()
        handle.remove()
        once = layer.gradients()
        layer.node.step()
        assert_equal(layer.gradients(), once)
        assert layer.error() < 1e-5


class TestMemory:
    def codes_of_z(self, monkeypatch):
        """Weak references to the bytes of every z that a forward stores."""
        kept, original = [], reference.saved_z

        def spy(*arguments):
            z = original(*arguments)
            kept.append(weakref.ref(z.bytes))
            return z

        monkeypatch.setattr(reference, "saved_z", spy)
        return kept

    @pytest.mark.parametrize("config", [FP8, STAGEWISE], ids=["fp8", "stagewise"])
    def test_saved_tensors_die_with_the_backward(self, monkeypatch, config):
        kept = self.codes_of_z(monkeypatch)
        layer = Layer(config=config)
        calls = [layer.call() for _ in range(3)]
        assert [ref() is not None for ref in kept] == [True, True, True]
        calls[0].backward()
        assert [ref() is not None for ref in kept] == [False, True, True]
        calls[1].backward()
        calls.pop()  # a forward that is dropped frees everything too
        assert [ref() is not None for ref in kept] == [False, False, False]

    @pytest.mark.parametrize("frozen", [None, 1], ids=["all trained", "one frozen"])
    def test_separate_experts_share_what_an_engine_writes(self, engine, frozen):
        """Autograd takes the memory of each projection as it is: every `.grad` is a part of it."""
        engine("writes")
        batches = problems(2)
        layer, wanted = Layer(batches[0]), Layer(batches[0], main_grad=0.0)
        for each in (layer, wanted):
            for index, weight in enumerate(each.weights):
                weight.requires_grad_(index != frozen)
        held = [weight for index, weight in enumerate(layer.weights) if index != frozen]
        layer.run(batches[0])
        memories = {weight.grad.untyped_storage().data_ptr() for weight in held}
        assert len(memories) == (2 if frozen is None else len(held))
        assert all(weight.grad.is_contiguous() for weight in held)
        layer.run(batches[1])
        for problem in batches:
            wanted.run(problem)
        for index, weight in enumerate(layer.weights):
            if index == frozen:
                assert weight.grad is None
            else:
                torch.testing.assert_close(weight.grad, wanted.weights[index].main_grad)


def test_a_compiled_model_has_graphs_around_dispatcher_and_node():
    """Their launches and collectives are called as they are."""
    problem = make_problem(tokens=37)
    dispatcher = LocalDispatcher(problem.num_experts)

    def block(x, ids, probs, node):
        tokens = dispatcher.dispatch(x * 2.0, ids, probs)
        out = node(tokens.x, tokens.tokens_per_expert, tokens.indices, tokens.probs)
        return dispatcher.combine(out, tokens.handle) + x

    found = []
    for run in (block, torch.compile(block, backend="aot_eager")):
        layer = Layer(problem, main_grad=0.0)
        x, probs = (
            torch.from_numpy(a).float().requires_grad_() for a in (problem.x, problem.probs)
        )
        y = run(x, torch.from_numpy(problem.indices), probs, layer.node)
        y.square().sum().backward()
        layer.node.step()
        found.append([y.detach(), x.grad, probs.grad, *(w.main_grad for w in layer.weights)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_autocast_does_not_reach_the_engine():
    """Automatic mixed precision around the layer must not round what the engine computes in fp32."""
    plain, mixed = (Layer(main_grad=0.0) for _ in range(2))
    expected = plain.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = mixed.step()
    assert_same_bits(mixed.result(call), plain.result(expected))
