"""Tokens that arrive in FP8 on the Hopper engine: the bits of tokens that it quantises itself, and
weight gradients of the reference engine on the same codes.
"""

from __future__ import annotations

import pytest
import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize

pytestmark = pytest.mark.gpu
T, H, I, E, K = 700, 512, 384, 6, 3
MODES = {
    "default": {},
    "stagewise": {"stagewise_memory": True},
    "recompute_z": {"recompute_z": True},
    "plain wgrad": {"fp8_wgrad": False},
}


class Problem:
    """Tokens as they are and as a sender quantises them; those without a valid slot are NaN."""

    def __init__(self, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape, scale=1.0):
            values = torch.randn(shape, generator=generator, device="cuda") * scale
            return values.to(torch.bfloat16)

        self.x, self.dout = normal(T, H), normal(T, H)
        self.weights = normal(E, H, 2 * I, scale=H**-0.5), normal(E, I, H, scale=I**-0.5)
        scores = torch.rand((T, E), generator=generator, device="cuda")
        self.indices = scores.topk(K, 1).indices
        self.indices[torch.rand((T, K), generator=generator, device="cuda") < 0.4] = -1
        self.probs = torch.rand((T, K), generator=generator, device="cuda") + 0.05
        q = quantize(self.x.float(), rows(128))
        self.codes, self.scale = q.codes.clone(), q.scale_inv.clone()
        unused = (self.indices < 0).all(1)
        assert bool(unused.any())
        self.codes.view(torch.uint8)[unused] = 0x7F
        self.scale[unused] = float("nan")

    def run(self, engine, *, quantised, **options):
        """out, dx, dprobs and both weight gradients."""
        config = SonicMoEConfig(engine=engine, fp8_mode="perf", **options)
        weights = [torch.nn.Parameter(weight.clone()) for weight in self.weights]
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        node = SonicMoEMlpNode.from_fused(*weights, config=config)
        probs = self.probs.clone().requires_grad_()
        if quantised:
            dx_to = torch.zeros_like(self.x).requires_grad_()
            given = {"x_scale": self.scale, "dx_to": dx_to}
            out = node(self.codes, None, self.indices, probs, **given)
        else:
            dx_to = self.x.clone().requires_grad_()
            out = node(dx_to, None, self.indices, probs)
        out.backward(self.dout)
        node.step()
        return [out.detach(), dx_to.grad, probs.grad, *(weight.main_grad for weight in weights)]


@pytest.mark.parametrize("mode", MODES)
def test_bits_and_weight_gradients(mode):
    problem, options = Problem(), MODES[mode]
    got = problem.run("hopper", quantised=True, **options)
    itself = problem.run("hopper", quantised=False)
    for name, ours, wanted in zip(("out", "dx", "dprobs"), got, itself, strict=False):
        assert torch.equal(ours, wanted), name
    reference = problem.run("reference", quantised=True, **options)
    for name, ours, wanted in zip(("dw1", "dw2"), got[3:], reference[3:], strict=True):
        error = (ours - wanted).norm() / wanted.norm()
        assert bool(torch.isfinite(ours).all()) and float(error) < 0.025, (name, float(error))


def test_repeats_bit_for_bit():
    problem = Problem(1)
    first, again = (problem.run("hopper", quantised=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
