"""Public calls on the GPU engines never write into their caller's tensors, where a kernel's stray
write would be a storage's changed byte; and nothing of a forward or backward waits for the device.

The node's own modes are in test_hopper_node_gpu.py.
"""

from __future__ import annotations

from itertools import product

import callers_tensors as callers
import pytest
import torch
from callers_tensors import SPELLINGS, check_face, check_node, given
from gpu.device import compiled_beforehand, waiting_is_an_error
from pairwise import pairwise

from sonicmoe import SonicMoEConfig

pytestmark = pytest.mark.gpu

H, I, E, K = 256, 128, 8, 4  # of transformers' experts
assert (H, I) == (callers.H, callers.I)
FACES = [face for face in callers.FACES if face != "MoE, plain"]


def config_of(engine, **changes):
    """By name: a fallback would wait or prove nothing, and say so in the log alone."""
    mode = "perf" if engine == "hopper" else "off"
    return SonicMoEConfig(**{"fp8_mode": mode, "engine": engine} | changes)


ENGINES = ("hopper", "bf16")
CONFIGS = [config_of("hopper"), config_of("hopper", fp8_wgrad=False), config_of("bf16")]
WAYS = ({}, {"flush": "step"}, {"flush": "step", "split_wgrad": True})
NODES = [
    *((engine, {}, options) for engine in ENGINES for options in WAYS),
    ("hopper", {"fp8_mode": "mem"}, {}),
    ("hopper", {"fp8_wgrad": False}, {}),
    ("hopper", {"iso_weight": True, "recompute_z": True}, {}),
]
# A compiler waits, too.
compiled = compiled_beforehand(*product(CONFIGS, ((E, H, I), (callers.E, H, I))))


@pytest.mark.parametrize(("face", "spelling", "engine"), pairwise(FACES, SPELLINGS, ENGINES))
def test_calls_leave_their_callers_tensors_alone(face, engine, spelling):
    with config_of(engine).activate():
        check_face(face, given("cuda", spelling), engine == "hopper")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("engine", "changes", "options"), NODES, ids=str)
def test_the_node_writes_main_grad_alone(engine, changes, options, spelling):
    check_node(given("cuda", spelling), config_of(engine, **changes), **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("face", FACES)
def test_the_pytorch_face_waits_for_nothing(face, engine):
    """Training and inference calls of the functional API and of `MoE`."""
    with config_of(engine).activate():
        _, call = callers.FACES[face](given("cuda"), engine == "hopper")
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
    model = hf_models.build(config).to("cuda", torch.bfloat16)
    names = ("is_transposed", "_apply_gate")
    return model, next(m for m in model.modules() if all(hasattr(m, name) for name in names))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_transformers_experts_wait_for_nothing(family, engine):
    """With sentinels, other tokens in every call, and an optimizer that moves the weights between
    two of them.
    """
    pytest.importorskip("transformers", minversion="5.7")
    from sonicmoe.integrations.transformers import register

    register()
    model, experts = experts_of(family)
    model.set_experts_implementation("sonicmoe_fp8" if engine == "hopper" else "sonicmoe")
    num_experts, weights = experts.gate_up_proj.shape[0], list(experts.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for tokens in (300, 129, 700):
        ids = torch.rand(tokens, num_experts, generator=generator).topk(K, 1).indices
        ids[torch.rand(tokens, K, generator=generator) < 0.3] = num_experts
        x, dout = torch.randn(2, tokens, H, generator=generator).to("cuda", torch.bfloat16)
        probs = torch.rand(tokens, K, generator=generator).to("cuda").requires_grad_()
        batches.append((x.requires_grad_(), ids.to("cuda"), probs, dout))

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

    with config_of(engine).activate():
        step()
        with waiting_is_an_error():
            for _ in range(2):
                results = step()
    finite = all(bool(torch.isfinite(result).all()) for result in results)
    assert finite and all(bool(result.any()) for result in results), "computed nothing"
