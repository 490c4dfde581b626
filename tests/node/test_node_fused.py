"""Stacked parameters `weight1 [E, H, 2I]`, `weight2 [E, I, H]`: trained like single ones, also where
a module holds others by the next call. That they are never moved is in test_node_life.py.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from engine.moe_golden import golden
from framework import numpy, parameter, relative_rmse, tensor, torch
from node.node_harness import FP8, FULL, Layer, assert_equal, problems

from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import ShapeError


@pytest.mark.parametrize("config", [FULL, FP8], ids=["full", "fp8"])
def test_trains_like_single_experts_with_no_layout_switch_anywhere(config):
    """Plain gradient descent on the parameters as they lie: the same bits as per-expert parameters,
    step after step.
    """
    batches = problems(3)
    fused, single = (
        Layer(batches[0], arrangement=arrangement, config=config, main_grad=0.0)
        for arrangement in ("fused", "per_expert")
    )
    for layer in (fused, single):
        layer.outs = []
        for batch in batches:
            layer.outs.append(numpy(layer.step(batch).out))
            with torch.no_grad():
                for weight in layer.weights:
                    weight.add_(weight.main_grad * tensor(np.float32(-0.05)))
            layer.zero_main_grad()
    assert_equal(fused.outs, single.outs)
    assert not np.array_equal(fused.outs[0], numpy(fused.run(batches[0]).out))
    for weight, experts in zip(
        fused.weights, (single.weights[:4], single.weights[4:]), strict=True
    ):
        assert_equal(numpy(weight), map(numpy, experts))


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
