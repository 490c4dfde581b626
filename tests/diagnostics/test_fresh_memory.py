"""Memory that is full of NaN for a while, and PyTorch's switches as they were afterwards."""

from __future__ import annotations

import pytest
import torch

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fills", [False, True])
def test_switches_are_as_before(deterministic, fills, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with memory_full_of_nan("cpu"):
            assert bool(torch.isnan(torch.empty(5)).all())
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(False)
