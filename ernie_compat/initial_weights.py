"""Initial weights made by numpy, so that the Paddle and the PyTorch model start from the same bits.

Every matrix is stored `[in, out]` (`y = x @ weight`), Paddle's convention and the node's.
"""

from __future__ import annotations

import math

import numpy as np

from .model_config import ModelConfig

EMBEDDING_STD = 0.02


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its name, in the order of the layers."""
    hidden, width = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        shapes[f"{prefix}.attention_norm.weight"] = (hidden,)
        shapes[f"{prefix}.attention.qkv_proj.weight"] = (hidden, 3 * hidden)
        shapes[f"{prefix}.attention.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp_norm.weight"] = (hidden,)
        if layer in config.moe_layers:
            shapes[f"{prefix}.mlp.router.weight"] = (hidden, config.num_experts)
            for expert in range(config.num_experts):
                shapes[f"{prefix}.mlp.experts.{expert}.up_gate_proj.weight"] = (hidden, 2 * width)
                shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (width, hidden)
        else:
            dense = config.dense_intermediate_size
            shapes[f"{prefix}.mlp.up_gate_proj.weight"] = (hidden, 2 * dense)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (dense, hidden)
    shapes["final_norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (hidden, config.vocab_size)
    return shapes


def initial_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """fp32 arrays by parameter name. Norms are 1; matrices are normal with variance 1 / fan_in.

    Projections back into the residual stream shrink by `sqrt(2 L)`, embedding, router and head
    start near zero, so that the first loss is close to `log(V)` and the first routing close to
    uniform.
    """
    rng = np.random.default_rng([seed, 0x57E16])
    weights = {}
    # One generator serves all parameters, so their order is part of the result: a parameter that is
    # added in the middle changes all behind it.
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, dtype=np.float32)
        else:
            values = rng.standard_normal(shape) * _std(name, shape, config)
            weights[name] = values.astype(np.float32)
    return weights


def has_weight_decay(name: str) -> bool:
    """Whether AdamW decays the parameter: matrices of the layers and the head, not norms and not
    the embedding.
    """
    return "norm" not in name and not name.startswith("embedding")


def rotary_tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """fp32 `cos, sin [S, head_dim]` for the rotate-half form of rotary position embedding."""
    # Computed in fp64 and rounded once, so that both frameworks get the same bits whatever their
    # own sine would give.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    positions = np.arange(config.seq_len, dtype=np.float64)
    angles = positions[:, None] * config.rope_theta ** -exponents[None, :]
    # Both halves of a head turn by the same angles.
    doubled = np.concatenate([angles, angles], axis=-1)
    return np.cos(doubled).astype(np.float32), np.sin(doubled).astype(np.float32)


def half_turn(head_dim: int) -> np.ndarray:
    """fp32 `[D, D]` with `x @ half_turn = [-x2, x1]` for `x = [x1, x2]`.

    One exact product by 0 and +-1; slicing and joining halves costs several times as much on a CPU,
    backward above all.
    """
    half = head_dim // 2
    turn = np.zeros((head_dim, head_dim), dtype=np.float32)
    # Column j of the result takes -x[half + j], and column half + j takes x[j].
    turn[np.arange(half, head_dim), np.arange(half)] = -1
    turn[np.arange(half), np.arange(half, head_dim)] = 1
    return turn


def causal_mask(seq_len: int) -> np.ndarray:
    """fp32 `[S, S]` added to attention scores: 0 where a position may look, a large negative number
    where not.
    """
    return np.triu(np.full((seq_len, seq_len), -1e9, dtype=np.float32), k=1)


def _std(name: str, shape: tuple[int, ...], config: ModelConfig) -> float:
    if name.startswith(("embedding", "lm_head")) or name.endswith("router.weight"):
        return EMBEDDING_STD
    std = 1 / math.sqrt(shape[0])
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return std / math.sqrt(2 * config.num_layers) if writes_residual else std
