"""Initial weights made by numpy, so that the Paddle and the PyTorch model start from the same bits.

Every matrix is stored `[in, out]` (`y = x @ weight`), Paddle's convention and the node's.
"""

from __future__ import annotations

import math

import numpy as np

from .model_config import ModelConfig

EMBEDDING_STD = 0.02


def initial_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> np.ndarray:
    """fp32 values of the parameter of this name, whatever others there are. Norms are 1; matrices are
    normal with variance 1 / fan_in.

    Projections back into the residual stream shrink by `sqrt(2 L)`, embedding, router and head
    start near zero, so that the first loss is close to `log(V)` and the first routing close to
    uniform.
    """
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    if name.startswith(("embedding", "lm_head")) or name.endswith("router.weight"):
        std = EMBEDDING_STD
    else:
        std = 1 / math.sqrt(shape[0])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * config.num_layers)
    values = np.random.default_rng([seed, *name.encode()]).standard_normal(shape, np.float32)
    return values * np.float32(std)


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


def causal_mask(seq_len: int) -> np.ndarray:
    """fp32 `[S, S]` added to attention scores: 0 where a position may look, a large negative number
    where not.
    """
    return np.triu(np.full((seq_len, seq_len), -1e9, dtype=np.float32), k=1)
