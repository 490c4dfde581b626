"""A whole training run in memory full of NaN: forward, two micro-batches, flush and changed weights
give the bits of a run in clean memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from faults import Allocations
from framework import IS_PADDLE
from node.test_node_faults import CASES, Run

if IS_PADDLE:
    pytest.skip("PyTorch's switch that fills uninitialised memory", allow_module_level=True)

from node.sentinel_layers import memory_full_of


@pytest.mark.parametrize("case", CASES)
def test_memory_full_of_nan_changes_no_bit(case):
    runs = []
    for nan in (False, True):
        with memory_full_of(nan, "cpu"):
            runs.append(Run(case, Allocations(counts=False)).run())
    clean, poisoned = runs
    for index, (got, want) in enumerate(zip(poisoned.results, clean.results, strict=True)):
        assert np.array_equal(got, want) and np.isfinite(got).all(), index
