"""`run_sonic_moe` on the GPU engines: the bits of a node of the same weights, in both layouts and with
`main_grad` as PaddleFleet has it, and nothing waits for the device.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import waiting_is_an_error
from gpu.engine_cases import make_case

from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.layer import layer_of
from sonicmoe.fleet.overlap import ExpertsStep
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_layout import fused_sonic_w1_to_grouped, fused_transpose_w2_layout
from sonicmoe.node.mlp_node import SonicMoEMlpNode
from sonicmoe.weights.pair import GROUPED

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 700, 512, 384, 6, 3
each_layout = pytest.mark.parametrize("layout", ["sonic", "grouped"])
each_precision = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])


@pytest.fixture(scope="module")
def case():
    return make_case(
        TOKENS, hidden=HIDDEN, intermediate=INNER, experts=EXPERTS, topk=TOPK, empty=(4,)
    )


def grouped(case):
    return fused_sonic_w1_to_grouped(case.weights[0]), fused_transpose_w2_layout(case.weights[1])


class Fleet:
    """Two parameters; `w2.main_grad` is grouped in either layout."""

    def __init__(self, case, layout, fp8):
        self.case, self.fp8, self.config = case, fp8, FP8Config()
        made = case.weights[:2] if layout == "sonic" else grouped(case)
        self.weights = [torch.nn.Parameter(weight.clone()) for weight in made]
        self.weights[0].main_grad = torch.zeros(made[0].shape, device="cuda")
        self.weights[1].main_grad = torch.zeros(EXPERTS, INNER, HIDDEN, device="cuda")
        self.sonic = layout == "sonic"

    def call(self, counts=None):
        x = self.case.x.clone().requires_grad_()
        scores = self.case.probs.clone().requires_grad_()
        ids = self.case.indices.to(torch.int32)
        arguments = (x, ids, scores, TOPK, EXPERTS, *self.weights, self.fp8, counts)
        out = run_sonic_moe(*arguments, fp8_config=self.config)
        out.backward(self.case.dout)
        return out, x.grad, scores.grad

    def gradients(self):
        """In Sonic's layout."""
        dw1, dw2 = (weight.main_grad for weight in self.weights)
        if not self.sonic:
            dw1 = GROUPED.native_w1(dw1)
        return dw1, dw2.transpose(1, 2)


def node_results(case, fp8):
    weights = [torch.nn.Parameter(weight.clone()) for weight in case.weights[:2]]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    config = FP8Config().node_config(fp8=fp8)
    node = SonicMoEMlpNode.from_native(*weights, config=config)
    for _ in range(2):
        x = case.x.clone().requires_grad_()
        scores = case.probs.clone().requires_grad_()
        out = node(x, None, case.indices, scores)
        out.backward(case.dout)
    return out, x.grad, scores.grad, *(weight.main_grad for weight in weights)


@each_precision
@each_layout
def test_has_the_bits_of_the_node(case, layout, fp8):
    """In BF16 the GEMMs cannot add to gate and up in halves; those gradients take the accumulators,
    and none waits.
    """
    fleet = Fleet(case, layout, fp8)
    buffers = [weight.main_grad for weight in fleet.weights]
    for _ in range(2):
        results = fleet.call()
    found = (*results, *fleet.gradients())
    assert all(w.main_grad is b for w, b in zip(fleet.weights, buffers, strict=True))
    wanted = node_results(case, fp8)
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(one, other)
    # Sums over two backwards are rounded at other places where they take the accumulators.
    for one, other in zip(found[3:], wanted[3:], strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)
    assert layer_of(*fleet.weights, HIDDEN).state.gradients.waiting == 0


@each_precision
@each_layout
def test_nothing_waits_for_the_device(case, layout, fp8):
    """Counts are a tensor on the GPU, as the allgather dispatcher gives them."""
    fleet = Fleet(case, layout, fp8)
    counts = torch.bincount(
        case.indices[(case.indices >= 0) & (case.indices < EXPERTS)], minlength=EXPERTS
    ).to(torch.int32)
    fleet.call(counts)
    with waiting_is_an_error():
        for again in (False, True, False):
            fleet.config.recompute_z = again
            fleet.call(counts)


def test_recomputing_z_per_call_makes_no_second_copy_of_the_weights(case):
    fleet = Fleet(case, "sonic", True)
    fleet.call()
    cache = layer_of(*fleet.weights, HIDDEN).state.weights._prepared
    held = cache.weights
    fleet.config.recompute_z = True
    fleet.call()
    assert cache.weights is held


@each_precision
def test_the_steps_of_a_schedule(case, fp8):
    fleet, stepped = Fleet(case, "sonic", fp8), Fleet(case, "sonic", fp8)
    wanted = fleet.call()
    step = ExpertsStep(TOPK, EXPERTS, *stepped.weights, fp8)
    out = step.forward(case.x, case.indices, case.probs)
    found = (out, *step.backward(case.dout))
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, stepped.gradients(), fleet.gradients()))
