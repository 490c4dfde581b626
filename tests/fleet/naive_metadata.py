"""PaddleFleet's metadata tuple by plain loops, and drawn indices."""

from __future__ import annotations

import numpy as np


def by_definition(indices, probs, experts, block):
    """The ten elements from their definitions."""
    tokens, topk = indices.shape
    # Positions: token after token, by ascending expert, then by column.
    positions = [
        (token, expert, k)
        for token in range(tokens)
        for expert in range(experts)
        for k in range(topk)
        if indices[token, k] == expert
    ]
    rows, offsets = [], [0]  # of each row the number of its position, or None
    for expert in range(experts):
        rows += [n for n, (_, of, _) in enumerate(positions) if of == expert]
        rows += [None] * (-len(rows) % block)
        offsets.append(len(rows))
    true = len(positions)
    padding = iter(range(true, len(rows)))
    scores = [probs[token, k] for token, _, k in positions] + [0.0] * (len(rows) - true)
    starts = [sum(token < t for token, _, _ in positions) for t in range(tokens + 1)]
    return (
        offsets,
        [0 if n is None else positions[n][0] for n in rows],
        [next(padding) if n is None else n for n in rows],
        [rows.index(n) for n in range(true)],
        starts,
        scores,
        len(rows),
        len(rows) - true,
        tokens,
        [token * topk + k for token, _, k in positions] if true else None,
    )


def drawn(tokens, topk, experts, seed, share=0.7):
    rng = np.random.default_rng(seed)
    indices = np.full((tokens, topk), -1)
    for token in range(tokens):
        here = rng.permutation(experts)[:topk]
        indices[token, : len(here)] = here
        rng.shuffle(indices[token])
    indices[rng.random((tokens, topk)) > share] = -1
    return indices, rng.random((tokens, topk)).astype(np.float32)
