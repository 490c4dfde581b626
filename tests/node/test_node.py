"""`SonicMoEMlpNode` under either framework: gradients, `main_grad`, micro-batches, flush modes,
frozen inputs.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import ALL_ACTIVATIONS, assert_same_bits, golden, make_problem, run_engine
from framework import numpy, relative_rmse, tensor, torch
from node.node_harness import (
    ARRANGEMENTS,
    FP8,
    FULL,
    Layer,
    assert_close,
    problems,
    summed,
    want_gradient,
)

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.interop import data_ptr
from sonicmoe.quant.recipes import RECIPES

both_sources = pytest.mark.parametrize("arrangement", ARRANGEMENTS)
each_flush = pytest.mark.parametrize("flush", ["auto", "step"])


class TestGradients:
    @both_sources
    @pytest.mark.parametrize("activation", ALL_ACTIVATIONS, ids=lambda a: a.value)
    def test_against_the_golden(self, activation, arrangement):
        layer = Layer(make_problem(activation), arrangement=arrangement)
        layer.set_main_grad(0.0)
        call = layer.run()
        layer.node.step()
        assert_close(layer.result(call), golden(layer.problem))

    @pytest.mark.parametrize("counts", ["list", "none", "empty", "tensor"])
    @pytest.mark.parametrize("index_dtype", ["int32", "int64"])
    def test_every_spelling_of_the_routing(self, counts, index_dtype):
        layer = Layer()
        layer.set_main_grad(0.0)
        call = layer.run(counts=counts, index_dtype=getattr(torch, index_dtype))
        layer.node.step()
        assert_close(layer.result(call), golden(layer.problem))

    @pytest.mark.parametrize(
        "config",
        [FULL, FP8, SonicMoEConfig(fp8_mode="mem", engine="reference")],
        ids=["full", "perf", "mem"],
    )
    def test_the_node_adds_nothing_to_the_engine(self, config):
        """The same bits as the engine alone, in bf16 and in FP8."""
        problem = make_problem(dtype=torch.bfloat16)
        layer = Layer(problem, dtype=torch.bfloat16, config=config)
        layer.set_main_grad(0.0)
        call = layer.run()
        layer.node.step()
        settings = EngineSettings(recipe=RECIPES["dx256"] if config.fp8_mode else None)
        assert call.out.dtype == call.x.grad.dtype == torch.bfloat16
        assert call.probs.grad.dtype == torch.float32
        assert_same_bits(layer.result(call), run_engine(problem, settings, torch.bfloat16))

    @pytest.mark.parametrize("config", [FULL, FP8], ids=["full", "fp8"])
    @pytest.mark.parametrize("case", ["no tokens", "nothing routed here"])
    @each_flush
    def test_empty_rank(self, case, config, flush):
        problem = make_problem(tokens=0 if case == "no tokens" else 9)
        problem = problem.but(indices=np.full_like(problem.indices, -1))
        layer = Layer(problem, config=config, flush=flush)
        layer.set_main_grad(None)
        call = layer.run()
        layer.node.step()
        assert tuple(call.out.shape) == problem.x.shape
        for name, got in layer.result(call).items():
            assert not got.any(), name
        assert all(weight.main_grad is not None for weight in layer.weights), (
            "every weight gets its zero gradient"
        )

    def test_garbage_at_invalid_slots(self):
        layer = Layer()
        layer.set_main_grad(0.0)
        problem = layer.problem
        invalid = (problem.indices < 0) | (problem.indices >= 4)
        call = layer.run(problem.but(probs=np.where(invalid, np.nan, problem.probs)))
        layer.node.step()
        assert_close(layer.result(call), golden(problem))
        assert not call.dprobs[invalid].any()


class TestMainGrad:
    @both_sources
    @each_flush
    @pytest.mark.parametrize("value", [0.0, 2.5, None])
    def test_private_or_none(self, arrangement, flush, value):
        layer = Layer(arrangement=arrangement, flush=flush)
        held = layer.set_main_grad(value)
        layer.run()
        layer.node.step()
        exact = golden(layer.problem)
        for got, want in zip(layer.gradients("main_grad"), (exact.dw1, exact.dw2), strict=True):
            assert relative_rmse(got, want + (value or 0.0)) < 1e-5
        for weight, before in zip(layer.weights, held, strict=True):
            assert weight.main_grad.dtype == torch.float32
            assert weight.grad is None
            assert before is None or weight.main_grad is before

    @both_sources
    @each_flush
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_absent_it_is_grad(self, arrangement, flush, dtype):
        dtype = getattr(torch, dtype)
        problem = make_problem(dtype=dtype)
        layer = Layer(problem, arrangement=arrangement, flush=flush, dtype=dtype)
        layer.run()
        if flush == "step":
            assert all(weight.grad is None for weight in layer.weights)
        layer.node.step()
        exact = golden(problem)
        for got, want in zip(layer.gradients("grad"), (exact.dw1, exact.dw2), strict=True):
            assert relative_rmse(got, want) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert all(weight.grad.dtype == dtype for weight in layer.weights)

    @both_sources
    @each_flush
    def test_a_slice_of_a_fused_buffer(self, arrangement, flush):
        batches = problems(2)
        layer = Layer(batches[0], arrangement=arrangement, flush=flush)
        sizes = [int(np.prod(tuple(weight.shape))) for weight in layer.weights]
        buffer = tensor(np.full(sum(sizes) + 16 * len(sizes), 3.0), torch.float32)
        pointer, used, first = data_ptr(buffer), np.zeros(tuple(buffer.shape), bool), 16
        for weight, size in zip(layer.weights, sizes, strict=True):
            weight.main_grad = buffer[first : first + size].view(list(weight.shape))
            used[first : first + size] = True
            first += size + 16
        for problem in batches:
            layer.run(problem)
        layer.node.step()
        assert data_ptr(buffer) == pointer
        assert (numpy(buffer)[~used] == 3.0).all()
        wanted = summed(map(golden, batches))
        for got, want in zip(layer.gradients("main_grad"), wanted, strict=True):
            assert relative_rmse(got, want + 3.0) < 1e-5


class TestMicroBatches:
    @both_sources
    @each_flush
    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
    def test_three_forwards_before_three_backwards(self, arrangement, flush, order):
        batches = problems(3)
        layer = Layer(batches[0], arrangement=arrangement, flush=flush)
        layer.set_main_grad(0.0)
        calls = [layer.call(problem) for problem in batches]
        for i in order:
            calls[i].backward()
        layer.node.step()
        exact = [golden(problem) for problem in batches]
        for call, want in zip(calls, exact, strict=True):
            assert relative_rmse(numpy(call.out), want.out) < 1e-5
            assert relative_rmse(call.dx, want.dx) < 1e-5
            assert relative_rmse(call.dprobs, want.dprobs) < 1e-5
        for got, want in zip(layer.gradients("main_grad"), summed(exact), strict=True):
            assert relative_rmse(got, want) < 1e-5

    @each_flush
    def test_an_outstanding_forward_survives_step(self, flush):
        """Weights are those of its forward, its gradient goes to the next step."""
        first, second = problems(2)
        layer = Layer(first, flush=flush)
        layer.set_main_grad(0.0)
        waiting = layer.call(second)
        layer.run(first)
        layer.node.step()
        layer.set_main_grad(0.0)
        layer.overwrite(first.but(up_gate=first.up_gate * 2, down=first.down * 2))
        waiting.backward()
        layer.node.step()
        assert_close(layer.result(waiting), golden(second))

    def test_flush_modes_differ_only_in_when(self):
        for flush in ("auto", "step"):
            layer = Layer(flush=flush)
            layer.set_main_grad(0.0)
            layer.run()
            seen = layer.gradients("main_grad")[0]
            assert bool(seen.any()) == (flush != "step")
            layer.node.step()
            once = layer.gradients("main_grad")
            assert once[0].any()
            layer.node.step()
            for before, after in zip(once, layer.gradients("main_grad"), strict=True):
                np.testing.assert_array_equal(before, after)

    def test_flush_grads_between_micro_batches_keeps_the_caches(self, prepared, weights_on_a_gpu):
        batches = problems(3)
        layer = Layer(batches[0])
        layer.set_main_grad(0.0)
        layer.node.step()
        for problem in batches:
            layer.run(problem)
            layer.node.flush_grads()
        assert len(prepared) == 1
        for got, want in zip(
            layer.gradients("main_grad"), summed(map(golden, batches)), strict=True
        ):
            assert relative_rmse(got, want) < 1e-5


class TestFrozen:
    @both_sources
    @each_flush
    @pytest.mark.parametrize("probs_grad", [True, False])
    def test_tokens(self, arrangement, flush, probs_grad):
        layer = Layer(arrangement=arrangement, flush=flush)
        layer.set_main_grad(0.0)
        call = layer.run(x_grad=False, probs_grad=probs_grad)
        layer.node.step()
        exact = golden(layer.problem)
        assert call.x.grad is None
        assert (call.probs.grad is None) == (not probs_grad)
        for got, want in zip(layer.gradients("main_grad"), (exact.dw1, exact.dw2), strict=True):
            assert relative_rmse(got, want) < 1e-5

    @both_sources
    @each_flush
    def test_experts(self, arrangement, flush):
        layer = Layer(arrangement=arrangement, flush=flush)
        for weight in layer.weights:
            want_gradient(weight, False)
        call = layer.run()
        layer.node.step()
        exact = golden(layer.problem)
        assert layer.node.gradient_bytes == 0
        assert all(weight.grad is None for weight in layer.weights)
        assert relative_rmse(call.dx, exact.dx) < 1e-5
        assert relative_rmse(call.dprobs, exact.dprobs) < 1e-5

    @each_flush
    def test_one_expert(self, flush):
        layer = Layer(flush=flush)
        layer.set_main_grad(0.0)
        want_gradient(layer.weights[0], False)
        layer.run()
        layer.node.step()
        dw1 = layer.gradients("main_grad")[0]
        assert not dw1[0].any()
        assert relative_rmse(dw1[1:], golden(layer.problem).dw1[1:]) < 1e-5
