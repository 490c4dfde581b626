"""Forms of the layer over two ranks, and which part of a parameter a rank has."""

from __future__ import annotations

import double_cases as cases
import numpy as np

TOKENS = 24  # of each rank
BATCHES = cases.micro_batches(2, tokens=2 * TOKENS)
# In the order of the columns: what a rank of I/EP columns needs of 128 at I = 256.
WIDE = {"moe_intermediate_size": 256}
FORMS = {
    "deepep": {},
    "deepep fp8": {"fp8": "e4m3"},
    "allgather": {"moe_token_dispatcher_type": "allgather", **WIDE},
    "allgather fp8": {"moe_token_dispatcher_type": "allgather", "fp8": "e4m3", **WIDE},
    "ring": {"moe_token_dispatcher_type": "ringmoe", **WIDE},
}


def own(form, name, value, rank, ranks):
    """A rank's experts, or its columns of gate and up and rows of down; the gate is everybody's."""
    if "gate" in name:
        return value
    if form.startswith("deepep"):
        return np.split(value, ranks, 0)[rank]
    if name.endswith("weight2"):
        return np.split(value, ranks, 1)[rank]
    halves = np.split(value, 2, -1)
    return np.concatenate([np.split(half, ranks, -1)[rank] for half in halves], -1)
