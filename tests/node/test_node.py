"""`SonicMoEMlpNode` under either framework: memory of gradients, micro-batches, frozen inputs. Numbers
are the oracle's.
"""

from __future__ import annotations

import pytest
from engine.moe_golden import golden
from node.node_harness import (
    ARRANGEMENTS,
    FLUSHES,
    Layer,
    assert_close,
    problems,
)
from oracle.case import Case
from oracle.faces import normal, run
from oracle.golden import scene_of
from oracle.laws import beyond_the_bars
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine

each_flush = pytest.mark.parametrize("flush", FLUSHES)


def covered(names, *values):
    """Every pair of values of two parameters in some case."""
    return pytest.mark.parametrize(names, pairwise(*values), ids=str)


class TestMicroBatches:
    @each_flush
    def test_an_outstanding_forward_survives_step(self, flush):
        """Weights are those of its forward, its gradient goes to the next step."""
        first, second = problems(2)
        layer = Layer(first, flush=flush, main_grad=0.0)
        waiting = layer.call(second)
        layer.step(first)
        layer.set_main_grad(0.0)
        layer.overwrite(first.but(up_gate=first.up_gate * 2, down=first.down * 2))
        waiting.backward()
        layer.node.step()
        assert_close(layer.result(waiting), golden(second))

    def test_flush_grads_between_micro_batches_keeps_the_caches(self, prepared, weights_on_a_gpu):
        batches = problems(3)
        layer = Layer(batches[0], main_grad=0.0)
        layer.node.step()
        for problem in batches:
            layer.run(problem)
            layer.node.flush_grads()
        assert len(prepared) == 1
        assert layer.error(*batches) < 1e-5


class TestFrozen:
    """A single frozen expert is in test_node_hazards.py."""

    @covered("arrangement, flush, probs_grad", ARRANGEMENTS, FLUSHES, [True, False])
    def test_tokens(self, arrangement, flush, probs_grad):
        layer = Layer(arrangement=arrangement, flush=flush, main_grad=0.0)
        call = layer.step(x_grad=False, probs_grad=probs_grad)
        assert call.x.grad is None
        assert (call.probs.grad is None) == (not probs_grad)
        assert layer.error() < 1e-5


def test_adapters_of_frozen_weights_run_no_product_of_their_gradients(monkeypatch):
    monkeypatch.delattr(ReferenceEngine, "backward_dw")
    case = Case(adapters="both", trains="biases", arrangement="fused")
    scene = scene_of(case)
    assert beyond_the_bars(case, scene, run(case, scene)) == []


@covered(
    "trains, line",
    ["b1", "b2", "biases", "weights"],
    [f"face={face} {fp8}" for face in ("node", "stacked", "sorted", "moe", "transformers")
     for fp8 in ("", "recipe=dx256", "recipe=dx256 fp8_wgrad=False stagewise_memory=True")],
)  # fmt: skip
def test_only_what_trains_is_computed(trains, line, monkeypatch):
    """The oracle has the bits of what is."""
    calls = []
    for name in ("bias_gradients", "backward_dw"):
        original = getattr(ReferenceEngine, name)

        def noted(self, *given, name=name, original=original):
            calls.append(name)
            return original(self, *given)

        monkeypatch.setattr(ReferenceEngine, name, noted)
    case = normal(Case.parse(f"{line} bias=True trains={trains}"))
    run(case, scene_of(case))
    assert calls == ["backward_dw" if trains == "weights" else "bias_gradients"]
