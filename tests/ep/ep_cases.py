"""One MoE layer's worth of inputs per rank, and what one process makes of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 24, 8, 3  # rows of two blocks of FP8
MATRICES = ("up_gate", "down")
DEEPEP = Path(__file__).parents[1] / "data" / "deepep"
# Cases in which tokens travel in FP8, and in which gradients of the output do.
IN_FP8 = (
    ("uneven", True, False),
    ("uneven", False, True),
    ("uneven", True, True),
    ("a rank without tokens", False, True),
    ("a rank that receives nothing", True, True),
    ("no tokens anywhere", True, True),
)
PRECISIONS = {
    "fp32": {}, "bf16": {"dtype": "bfloat16"}, "fp8": {"dtype": "bfloat16", "fp8": True},
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One rank's tokens, global routing, and the gradient of its output."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    dout: np.ndarray


def source(tokens, seed, experts=range(EXPERTS), dropped=0.2):
    """`tokens` rows that pick distinct ids among `experts`; a share of slots is "not here" in
    every spelling, with a weight that must not matter.
    """
    rng = np.random.default_rng([seed, tokens])
    experts = list(experts)
    take = min(TOPK, len(experts))
    ids = np.full((tokens, TOPK), -1, dtype=np.int64)
    for row in ids:
        row[rng.permutation(TOPK)[:take]] = rng.choice(experts, take, replace=False)
    spelling = np.array([-1, EXPERTS, EXPERTS + 3, 2**40])[rng.integers(0, 4, ids.shape)]
    ids = np.where((rng.random(ids.shape) < dropped) | (ids < 0), spelling, ids)
    draw = lambda: rng.standard_normal((tokens, HIDDEN)).astype(np.float32)  # noqa: E731
    return Source(draw(), ids, (rng.random(ids.shape) + 0.1).astype(np.float32), draw())


def not_here(ids):
    return (ids < 0) | (ids >= EXPERTS)


@cache
def cases(world):
    """By name, the sources of every rank, which nobody writes."""
    local = EXPERTS // world
    return {
        "uneven": [source(tokens, 1) for tokens in (40, 7, 23, 31)[:world]],
        "a rank without tokens": [
            source(0 if rank == 0 else 20, 2 + rank) for rank in range(world)
        ],
        "a rank that receives nothing": [
            source(18, 10 + rank, range(EXPERTS - local)) for rank in range(world)
        ],
        "an expert without tokens": [
            source(18, 20 + rank, [0, 1, 2, 4, 5, 6, 7]) for rank in range(world)
        ],
        "one expert takes all": [
            source(11 + rank, 30 + rank, [EXPERTS - 1], dropped=0) for rank in range(world)
        ],
        "one token in the world": [
            source(int(rank == world - 1), 40 + rank, dropped=0) for rank in range(world)
        ],
        "every slot dropped": [source(9, 50 + rank, dropped=1.1) for rank in range(world)],
        "no tokens anywhere": [source(0, 60) for _ in range(world)],
    }


def precision_of(case):
    """In which precision a case runs without counts: each with each kind of case, not all with all."""
    return [*PRECISIONS][list(cases(2)).index(case) % 3]


def joined(sources):
    """All ranks' tokens as one process holds them."""
    return Source(
        *(
            np.concatenate([getattr(s, name) for s in sources])
            for name in Source.__dataclass_fields__
        )
    )


def expert_weights():
    """up_gate `[E, H, 2I]` and down `[E, I, H]`, fp32; the caller's own."""
    return tuple(drawn.copy() for drawn in _drawn_weights())


@cache
def _drawn_weights():
    rng = np.random.default_rng(7)
    up = rng.standard_normal((EXPERTS, HIDDEN, 2 * INTERMEDIATE)) * HIDDEN**-0.5
    down = rng.standard_normal((EXPERTS, INTERMEDIATE, HIDDEN)) * INTERMEDIATE**-0.5
    return up.astype(np.float32), down.astype(np.float32)
