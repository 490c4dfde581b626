"""Tiny random models, built from their configurations; `experts_walk` has the experts of every one."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

VOCABULARY, EXPERTS = 64, 6
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _family(kind, dense=0, **own):
    """Its configuration with so many layers of experts."""
    return lambda layers: kind(**COMMON, num_hidden_layers=layers + dense, **own)


FAMILIES = {
    "qwen3-moe": _family(Qwen3MoeConfig, moe_intermediate_size=40, num_experts=EXPERTS, head_dim=8),
    "mixtral": _family(MixtralConfig, num_local_experts=EXPERTS),
    "olmoe": _family(OlmoeConfig, num_experts=EXPERTS),
    "deepseek-v3": _family(
        DeepseekV3Config, dense=1, first_k_dense_replace=1, moe_intermediate_size=40, n_routed_experts=8,
        n_shared_experts=1, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    ),
    "gpt-oss": _family(GptOssConfig, num_local_experts=EXPERTS, head_dim=8, rope_parameters=PLAIN_ROPE),
}  # fmt: skip
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
# Every family once, by turns in one of the implementations; test_transformers_models.py has the
# numbers of all pairs.
BY_TURNS = pytest.mark.parametrize(
    ("family", "implementation"),
    list(zip(FAMILIES, itertools.cycle(["sonicmoe", "sonicmoe_fp8"]), strict=False)),
)


def text(length: int = 24, seed: int = 1) -> torch.Tensor:
    """Ids of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, length), generator=generator)


def build(config, implementation: str = "eager", seed: int = 0) -> torch.nn.Module:
    """An fp32 model in training mode whose experts weigh as much as its residual stream."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation=implementation,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.train()


def run(model: torch.nn.Module, implementation: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every parameter of the language-modelling loss."""
    ids = text(seed=seed)
    model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(input_ids=ids.to(model.device), labels=ids.to(model.device), use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


def run_experts(experts, implementation, x, ids, weights, dout):
    """out of one experts module, dx, the gradient of the routing weights, and every parameter's."""
    experts.config._experts_implementation = implementation
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, ids, weights)
    assert not out._is_view()
    wanted = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    gradients = torch.autograd.grad(out, list(wanted.values()), dout)
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def errors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative RMSE of every tensor; both runs must have the same ones."""
    assert set(actual) == set(expected)
    return {name: relative_rmse(actual[name], value) for name, value in expected.items()}


def relative_rmse(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; the norm itself where the expected tensor
    vanishes.
    """
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    norm = float(expected.norm())
    return float((actual - expected).norm()) / (norm or 1.0)
