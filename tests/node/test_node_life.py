"""What the node keeps and leaves alone over a training run: memory, the caller's tensors, weight
caches.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
from engine.moe_golden import golden
from framework import numpy, parameter, relative_rmse, torch
from node.node_harness import (
    FP8,
    FULL,
    Layer,
    assert_equal,
    has_gradient_path,
)

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.ernie_compat import SonicMoEMlpNode


class TestInference:
    def test_no_grad_keeps_nothing(self):
        layer, forward = Layer(), ReferenceEngine.forward
        spy = mock.patch.object(ReferenceEngine, "forward", autospec=True, side_effect=forward)
        with torch.no_grad(), spy as called:
            call = layer.call()
        assert called.call_args.kwargs["save"] is False
        assert layer.node.gradient_bytes == 0
        assert not has_gradient_path(call.out)

    def test_gradient_memory_begins_with_the_first_backward(self):
        layer = Layer(flush="step")
        assert layer.node.warmup() == ()
        layer.node.prequantize_weights()
        call = layer.call()
        assert layer.node.gradient_bytes == 0
        call.backward()
        assert layer.node.gradient_bytes == 4 * (4 * 80 * 96 + 4 * 48 * 80)
        with pytest.raises(RuntimeError, match="never flushed"):
            layer.node.release_grads()
        layer.node.step()
        layer.node.release_grads()
        assert layer.node.gradient_bytes == 0


class TestCaches:
    def test_flush_grads_between_micro_batches_keeps_them(self, prepared, weights_on_a_gpu):
        layer = Layer(main_grad=0.0)
        layer.node.step()
        for _ in range(3):
            layer.run()
            layer.node.flush_grads()
        assert len(prepared) == 1

    def test_prequantize_is_the_forwards_cache(self, prepared, weights_on_a_gpu):
        layer = Layer(config=FP8)
        layer.node.step()
        layer.node.prequantize_weights()
        assert len(prepared) == 1
        layer.run()
        assert len(prepared) == 1
        layer.node.invalidate_caches()
        layer.run()
        assert len(prepared) == 2


class TestParametersByName:
    """`(module, name)` in place of a tensor: what the module holds when a call begins."""

    def layer(self, arrangement):
        """A `Layer` whose node looks its parameters up in `layer.module`."""
        layer = Layer(arrangement=arrangement)
        layer.module = SimpleNamespace(weight1=layer.weights[0], weight2=layer.weights[1])
        make = getattr(SonicMoEMlpNode, f"from_{arrangement}")
        names = ((layer.module, "weight1"), (layer.module, "weight2"))
        layer.node = make(*names, layer.problem.activation, config=FULL)
        return layer

    def replace(self, layer, factor=2.0):
        """Other parameters, as `load_state_dict(assign=True)` leaves them."""
        layer.weights = [parameter(factor * numpy(w), w.dtype) for w in layer.weights]
        layer.module.weight1, layer.module.weight2 = layer.weights

    @pytest.mark.parametrize("arrangement", ["fused", "native"])
    def test_new_ones_are_read_and_trained(self, arrangement):
        layer = self.layer(arrangement)
        old = layer.weights
        layer.set_main_grad(0.0)
        layer.run()
        self.replace(layer)
        before = [numpy(weight.main_grad).copy() for weight in old]
        layer.set_main_grad(0.0)
        call, p = layer.step(), layer.problem
        twice = p.but(up_gate=2 * p.up_gate, down=2 * p.down)
        assert relative_rmse(numpy(call.out), golden(twice).out) < 1e-5
        assert layer.error(twice) < 1e-5
        assert_equal([numpy(weight.main_grad) for weight in old], before)

    def test_a_copy_reads_the_module_that_was_copied_with_it(self):
        layer = self.layer("fused")
        node, module = copy.deepcopy((layer.node, layer.module))
        self.replace(layer, 3.0)
        assert node._state.parameters.parameters()[0] is module.weight1


def test_fp32_weights_are_warmed_up_for_the_tokens_of_mixed_precision(monkeypatch):
    """On a GPU tokens in fp32 have no kernels, so nothing would be compiled."""
    asked = {}

    def warmup_jit(*_sizes, **given):
        asked.update(given)
        return SimpleNamespace(kernels=())

    monkeypatch.setattr("sonicmoe.node.upkeep.warmup_jit", warmup_jit)
    for dtype, tokens in ((torch.float32, "bfloat16"), (torch.float16, "float16")):
        Layer(dtype=dtype).node.warmup()
        assert asked["dtype"] == tokens
