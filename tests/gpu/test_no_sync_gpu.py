"""Nothing of a forward or backward waits for the device: the PyTorch face on both GPU engines, and
transformers' experts on them.

The node's own modes are in test_hopper_node_gpu.py.
"""

from __future__ import annotations

import os

import pytest
import torch
from callers_tensors import FACES, given
from gpu.device import waiting_is_an_error

from sonicmoe import SonicMoEConfig
from sonicmoe.jit import no_compile
from sonicmoe.jit_warmup import warmup_jit

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
H, I, E, K = 256, 128, 8, 4
# By name: a fallback would wait, and say so in the log alone.
CONFIGS = {
    "hopper": SonicMoEConfig(fp8_mode="perf", engine="hopper"),
    "bf16": SonicMoEConfig(fp8_mode="off", engine="bf16"),
}
ENGINES = pytest.mark.parametrize("engine", CONFIGS)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Nothing below may compile: a compiler waits, too."""
    for config in CONFIGS.values():
        assert warmup_jit(E, H, I, DEVICE, config=config, jobs=os.cpu_count()).complete
    with no_compile():
        yield


@ENGINES
@pytest.mark.parametrize("face", [face for face in FACES if face != "MoE, plain"])
def test_the_pytorch_face(face, engine):
    """Training and inference calls of the functional API and of `MoE`."""
    with CONFIGS[engine].activate():
        _, call = FACES[face](given(DEVICE), engine == "hopper")
        call()  # allocates, and loads kernels
        with waiting_is_an_error():
            for _ in range(2):
                results = call()
    assert all(bool(result.any()) for result in results), "computed nothing"


def experts_of(family):
    """A model of transformers in bf16, and its experts."""
    from integrations import hf_models

    config = hf_models.FAMILIES[family](1)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = H, I, I
    model = hf_models.build(config).to(DEVICE, torch.bfloat16)
    found = [
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")
    ]
    return model, found[0]


@ENGINES
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_transformers_experts(family, engine):
    """With sentinels, other tokens in every call, and an optimizer that moves the weights between
    two of them.
    """
    pytest.importorskip("transformers", minversion="5.7")
    from sonicmoe.integrations.transformers import register

    register()
    model, experts = experts_of(family)
    model.set_experts_implementation("sonicmoe_fp8" if engine == "hopper" else "sonicmoe")
    num_experts = experts.gate_up_proj.shape[0]
    weights = list(experts.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for tokens in (300, 129, 700):
        ids = torch.rand(tokens, num_experts, generator=generator).topk(K, 1).indices
        ids[torch.rand(tokens, K, generator=generator) < 0.3] = num_experts
        x, dout = (
            torch.randn(tokens, H, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2)
        )
        probs = torch.rand(tokens, K, generator=generator).to(DEVICE).requires_grad_()
        batches.append((x.requires_grad_(), ids.to(DEVICE), probs, dout))

    def step():
        for x, ids, probs, dout in batches:
            out = experts(x, ids, probs)
            with torch.no_grad():
                experts(x, ids, probs)
            dx, dprobs, *gradients = torch.autograd.grad(out, [x, probs, *weights], dout)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
        return out.detach(), dx, dprobs, *gradients

    with CONFIGS[engine].activate():
        step()
        with waiting_is_an_error():
            for _ in range(2):
                results = step()
    assert all(bool(torch.isfinite(result).all()) and bool(result.any()) for result in results), (
        "computed nothing"
    )
