"""`SonicMoEMlpNode` under either framework: gradients, `main_grad`, micro-batches, flush modes,
frozen inputs.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import golden, make_problem
from framework import numpy, relative_rmse, tensor, torch
from node.node_harness import (
    ARRANGEMENTS,
    FLUSHES,
    Layer,
    assert_close,
    assert_equal,
    problems,
    want_gradient,
)
from pairwise import pairwise

from sonicmoe.interop import data_ptr

both_sources = pytest.mark.parametrize("arrangement", ARRANGEMENTS)
each_flush = pytest.mark.parametrize("flush", FLUSHES)


# Of GPT-OSS, DeepSeek-V4 and Gemma 4, with numbers that these tokens reach.
GATES = {
    "swiglu_oai": {"alpha": 1.25, "limit": 2.0},
    "swiglu_clamp": {"limit": 2.0},
    "geglu_tanh": {},
}


def covered(names, *values):
    """Every pair of values of two parameters in some case."""
    return pytest.mark.parametrize(names, pairwise(*values), ids=str)


class TestWhereGradientsGo:
    @covered("arrangement, flush, dtype", ARRANGEMENTS, FLUSHES, ("float32", "bfloat16"))
    def test_without_main_grad_it_is_grad(self, arrangement, flush, dtype):
        dtype = getattr(torch, dtype)
        problem = make_problem(dtype=dtype)
        layer = Layer(problem, arrangement=arrangement, flush=flush, dtype=dtype)
        layer.run()
        if flush == "step":
            assert all(weight.grad is None for weight in layer.weights)
        layer.node.step()
        assert layer.error(attribute="grad") < (1e-5 if dtype == torch.float32 else 1e-2)
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
        layer.step(*batches)
        assert data_ptr(buffer) == pointer
        assert (numpy(buffer)[~used] == 3.0).all()
        assert layer.error(*batches, held=3.0) < 1e-5


class TestMicroBatches:
    @covered("arrangement, flush, order", ARRANGEMENTS, FLUSHES, [(0, 1, 2), (2, 0, 1), (2, 1, 0)])
    def test_three_forwards_before_three_backwards(self, arrangement, flush, order):
        """Summed where they lie, at once or in the first `step()`."""
        batches = problems(3)
        layer = Layer(batches[0], arrangement=arrangement, flush=flush)
        held = layer.set_main_grad(0.25)
        places = list(map(data_ptr, held))
        calls = [layer.call(problem) for problem in batches]
        for i in order:
            calls[i].backward()
        before = layer.gradients()
        assert (before[0] == 0.25).all() == (flush == "step") == bool(layer.node.gradient_bytes)
        layer.node.step()
        once = layer.gradients()
        if flush == "auto":
            assert_equal(before, once)
        layer.node.step()
        assert_equal(layer.gradients(), once)
        assert layer.error(*batches, held=0.25) < 1e-5
        for call, want in zip(calls, map(golden, batches), strict=True):
            assert relative_rmse(numpy(call.out), want.out) < 1e-5
            assert relative_rmse(call.dx, want.dx) < 1e-5
            assert relative_rmse(call.dprobs, want.dprobs) < 1e-5
        assert all(w.main_grad is h for w, h in zip(layer.weights, held, strict=True))
        assert list(map(data_ptr, held)) == places

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

    @both_sources
    @each_flush
    def test_experts(self, arrangement, flush):
        layer = Layer(arrangement=arrangement, flush=flush)
        for weight in layer.weights:
            want_gradient(weight, False)
        call = layer.step()
        exact = golden(layer.problem)
        assert layer.node.gradient_bytes == 0
        assert all(weight.grad is None for weight in layer.weights)
        assert relative_rmse(call.dx, exact.dx) < 1e-5
        assert relative_rmse(call.dprobs, exact.dprobs) < 1e-5
