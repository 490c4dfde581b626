"""Tiny random models of every supported family, built from their configurations."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GptOssConfig,
    Lfm2MoeConfig,
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


def _deepseek(layers: int) -> DeepseekV3Config:
    return DeepseekV3Config(
        **COMMON, num_hidden_layers=layers + 1, first_k_dense_replace=1, moe_intermediate_size=40, n_routed_experts=8,
        n_shared_experts=1, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


def _ernie(layers: int) -> Ernie4_5_MoeConfig:
    return Ernie4_5_MoeConfig(
        **COMMON, num_hidden_layers=layers + 1, moe_layer_start_index=1, moe_intermediate_size=40,
        moe_num_experts=EXPERTS, moe_k=2, moe_num_shared_experts=1,
    )  # fmt: skip


def _lfm2(layers: int) -> Lfm2MoeConfig:
    return Lfm2MoeConfig(
        **COMMON, num_hidden_layers=layers + 1, num_dense_layers=1, moe_intermediate_size=40, num_experts=EXPERTS,
        layer_types=["full_attention", "conv", "full_attention"][: layers + 1], rope_parameters=PLAIN_ROPE,
    )  # fmt: skip


FAMILIES = {
    "qwen3-moe": lambda layers: Qwen3MoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        moe_intermediate_size=40,
        num_experts=EXPERTS,
        head_dim=8,
    ),
    "mixtral": lambda layers: MixtralConfig(
        **COMMON, num_hidden_layers=layers, num_local_experts=EXPERTS
    ),
    "olmoe": lambda layers: OlmoeConfig(**COMMON, num_hidden_layers=layers, num_experts=EXPERTS),
    "deepseek-v3": _deepseek,
    "ernie-4.5-moe": _ernie,
    "lfm2-moe": _lfm2,
    "gpt-oss": lambda layers: GptOssConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_local_experts=EXPERTS,
        head_dim=8,
        rope_parameters=PLAIN_ROPE,
    ),
}


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
