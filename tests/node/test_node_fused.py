"""Stacked parameters `weight1 [E, H, 2I]`, `weight2 [E, I, H]`: never moved, copied over or re-laid
out, and trained like single ones.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from engine.moe_golden import golden
from framework import numpy, parameter, relative_rmse, tensor, torch
from node_harness import FP8, FULL, Layer, problems

from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import ShapeError

FLUSHES = ("auto", "step", "backward")


def storage(tensors):
    """Address and bytes of each."""
    return [(t.data_ptr(), numpy(t).tobytes()) for t in tensors]


@pytest.mark.parametrize("config", [FULL, FP8], ids=["full", "fp8"])
@pytest.mark.parametrize("flush", FLUSHES)
def test_weights_and_main_grads_keep_their_storage(flush, config):
    batches = problems(3)
    layer = Layer(batches[0], arrangement="fused", flush=flush, config=config)
    main_grads = layer.set_main_grad(0.0)
    weights, addresses = storage(layer.weights), [main_grad.data_ptr() for main_grad in main_grads]
    layer.node.prequantize_weights()
    calls = [layer.call(batch) for batch in batches]
    for call in calls:
        call.backward()
        assert storage(layer.weights) == weights
    layer.node.flush_grads()
    layer.node.step()
    layer.node.invalidate_caches()
    layer.run(batches[1])
    layer.node.step()
    assert storage(layer.weights) == weights
    for weight, main_grad, address in zip(layer.weights, main_grads, addresses, strict=True):
        assert weight.main_grad is main_grad and main_grad.data_ptr() == address
        assert weight.grad is None and numpy(main_grad).any()


@pytest.mark.parametrize("config", [FULL, FP8], ids=["full", "fp8"])
def test_trains_like_single_experts_with_no_layout_switch_anywhere(config):
    """Plain gradient descent on the parameters as they lie: the same bits as per-expert parameters,
    step after step.
    """
    batches = problems(3)
    fused, single = (
        Layer(batches[0], arrangement="fused", config=config),
        Layer(batches[0], config=config),
    )
    for layer in (fused, single):
        layer.set_main_grad(0.0)
        layer.outs = []
        for batch in batches:
            layer.outs.append(numpy(layer.run(batch).out))
            layer.node.step()
            with torch.no_grad():
                for weight in layer.weights:
                    weight.add_(weight.main_grad * tensor(np.float32(-0.05)))
                    weight.main_grad.zero_()
    for ours, theirs in zip(fused.outs, single.outs, strict=True):
        assert np.array_equal(ours, theirs)
    assert not np.array_equal(fused.outs[0], numpy(fused.run(batches[0]).out))
    stacked = [
        np.stack([numpy(w) for w in half])
        for half in (
            single.weights[: len(single.weights) // 2],
            single.weights[len(single.weights) // 2 :],
        )
    ]
    for weight, wanted in zip(fused.weights, stacked, strict=True):
        assert np.array_equal(numpy(weight), wanted)


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
        call = layer.run()
        layer.node.step()
        p = layer.problem
        wanted = golden(p.but(up_gate=2 * p.up_gate, down=2 * p.down))
        assert relative_rmse(numpy(call.out), wanted.out) < 1e-5
        for got, want in zip(layer.gradients("main_grad"), (wanted.dw1, wanted.dw2), strict=True):
            assert relative_rmse(got, want) < 1e-5
        for weight, gradient in zip(old, before, strict=True):
            assert np.array_equal(numpy(weight.main_grad), gradient)

    def test_new_ones_are_checked(self):
        layer = self.layer("fused")
        layer.module.weight1 = parameter(numpy(layer.weights[0])[:, :-2], torch.float32)
        with pytest.raises(ShapeError, match="weight2 has shape"):
            layer.call()
        self.replace(layer)
        layer.module.weight1 = parameter(numpy(layer.weights[0])[:2], torch.float32)
        layer.module.weight2 = parameter(numpy(layer.weights[1])[:2], torch.float32)
        with pytest.raises(ShapeError, match="by now; the node was made for"):
            layer.call()

    def test_a_copy_reads_the_module_that_was_copied_with_it(self):
        layer = self.layer("fused")
        node, module = copy.deepcopy((layer.node, layer.module))
        self.replace(layer, 3.0)
        assert node._state.parameters.parameters()[0] is module.weight1
