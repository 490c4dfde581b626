"""Nothing of a forward or backward of the PyTorch face waits for the device. That a call leaves its
caller's tensors alone, the oracle looks at in every case.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import compiled_beforehand, waiting_is_an_error

from sonicmoe import MoE, SonicMoEConfig, moe_general_routing_inputs, moe_TC_softmax_topk_layer
from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

T, H, I, E, K = 150, 256, 128, 4, 2
# By name: a fallback would wait, and say so in the log alone.
CONFIGS = {
    "hopper": SonicMoEConfig(fp8_mode="perf", engine="hopper"),
    "bf16": SonicMoEConfig(fp8_mode="off", engine="bf16"),
}
# A compiler waits, too.
compiled = compiled_beforehand(*((config, (E, H, I)) for config in CONFIGS.values()))


class Step:
    """A layer on one device, and a training step of it through each face."""

    def __init__(self, device, fp8):
        torch.manual_seed(0)
        self.fp8, self.moe = fp8, MoE(E, K, H, I, std=0.1).to(device, torch.bfloat16)
        self.x = torch.randn(T, H, device=device, dtype=torch.bfloat16).requires_grad_()
        self.dout = torch.randn(T, H, device=device, dtype=torch.bfloat16)
        self.ids = torch.rand(T, E, device=device).topk(K, 1).indices
        self.probs = torch.rand(T, K, device=device).requires_grad_()
        self.tokens = torch.arange(T, device=device).repeat_interleave(K)
        self.weights = self.moe.c_fc.weight, self.moe.c_proj.weight

    def experts(self, layout=None):
        given = self.x, self.ids, self.probs, *self.weights, None, None, ActivationType.SWIGLU
        with torch.no_grad():
            expert_mlp(*given, layout=layout, use_fp8=self.fp8, inference=True)
        return expert_mlp(*given, layout=layout, use_fp8=self.fp8)

    def views(self):
        w1, w2 = (weight.permute(1, 2, 0) for weight in self.weights)
        return w1, None, w2, None

    def topk(self):
        router = self.moe.router.weight
        return moe_TC_softmax_topk_layer(self.x, router, *self.views(), K, use_fp8=self.fp8)[0]

    def triples(self):
        given = self.x, self.probs.flatten(), self.tokens, self.ids.flatten(), *self.views(), E
        options = {"concat_layout": True, "use_fp8": self.fp8, "max_experts_per_token": K}
        return moe_general_routing_inputs(*given, **options)[0]

    def layer(self):
        with torch.no_grad():
            self.moe(self.x, is_inference_mode=True, use_fp8=self.fp8)
        return self.moe(self.x, use_fp8=self.fp8)[0]


FACES = {
    "expert_mlp": Step.experts,
    # As transformers stores them.
    "expert_mlp, split halves": lambda step: step.experts(WeightLayout(split_half=True)),
    "moe_TC_softmax_topk_layer": Step.topk,
    "moe_general_routing_inputs": Step.triples,
    "MoE": Step.layer,
}


def run(step, face):
    """The output, and the gradients of the tokens and of both weights."""
    out = FACES[face](step)
    return [out.detach(), *torch.autograd.grad(out, [step.x, *step.weights], step.dout)]


@pytest.mark.parametrize("engine", CONFIGS)
@pytest.mark.parametrize("face", FACES)
def test_the_pytorch_face_waits_for_nothing(face, engine):
    """Training and inference calls of the functional API and of `MoE`."""
    with CONFIGS[engine].activate():
        step = Step("cuda", engine == "hopper")
        run(step, face)  # allocates, and loads kernels
        with waiting_is_an_error():
            for _ in range(2):
                results = run(step, face)
    assert all(bool(result.any()) for result in results), "computed nothing"
