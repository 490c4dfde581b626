"""Sizes of the experts of public MoE models, from their published configurations. Imports no
framework.

Field names differ: H is `hidden_size` (`d_model`), I is `moe_intermediate_size`
(`intermediate_size`, `ffn_hidden_size`), E is `num_experts` (`n_routed_experts`,
`num_local_experts`, `moe_num_experts`), K is `num_experts_per_tok` (`moe_k`, `moe_top_k`). Shared
experts and dense layers are not counted.
"""

from __future__ import annotations

from typing import NamedTuple


class ModelSizes(NamedTuple):
    """H, I, E of the whole model, K."""

    hidden: int
    intermediate: int
    experts: int
    topk: int


PUBLIC_MODELS: dict[str, ModelSizes] = {
    "DBRX": ModelSizes(6144, 10752, 16, 4),
    "DeepSeek-V2": ModelSizes(5120, 1536, 160, 6),
    "DeepSeek-V2-Lite": ModelSizes(2048, 1408, 64, 6),
    "DeepSeek-V3": ModelSizes(7168, 2048, 256, 8),
    "ERNIE-4.5-21B-A3B": ModelSizes(2560, 1536, 64, 6),
    "ERNIE-4.5-300B-A47B": ModelSizes(8192, 3584, 64, 8),
    "GLM-4.5": ModelSizes(5120, 1536, 160, 8),
    "GLM-4.5-Air": ModelSizes(4096, 1408, 128, 8),
    "GPT-OSS-20B": ModelSizes(2880, 2880, 32, 4),
    "GPT-OSS-120B": ModelSizes(2880, 2880, 128, 4),
    "Granite-3.0-1B-A400M": ModelSizes(1024, 512, 32, 8),
    "Granite-3.0-3B-A800M": ModelSizes(1536, 512, 40, 8),
    "Kimi-K2": ModelSizes(7168, 2048, 384, 8),
    "Llama-4-Maverick": ModelSizes(5120, 8192, 128, 1),
    "Llama-4-Scout": ModelSizes(5120, 8192, 16, 1),
    "Mixtral-8x7B": ModelSizes(4096, 14336, 8, 2),
    "Mixtral-8x22B": ModelSizes(6144, 16384, 8, 2),
    "OLMoE-1B-7B": ModelSizes(2048, 1024, 64, 8),
    "Phi-3.5-MoE": ModelSizes(4096, 6400, 16, 2),
    "Qwen1.5-MoE-A2.7B": ModelSizes(2048, 1408, 60, 4),
    "Qwen2-57B-A14B": ModelSizes(3584, 2560, 64, 8),
    "Qwen3-30B-A3B": ModelSizes(2048, 768, 128, 8),
    "Qwen3-235B-A22B": ModelSizes(4096, 1536, 128, 8),
    "Qwen3-Next-80B-A3B": ModelSizes(2048, 512, 512, 10),
}


def expert_sizes() -> dict[str, tuple[int, int]]:
    """Every distinct (H, I), under the name of the first model that has it."""
    first: dict[tuple[int, int], str] = {}
    for name, model in PUBLIC_MODELS.items():
        first.setdefault((model.hidden, model.intermediate), name)
    return {name: sizes for sizes, name in first.items()}
