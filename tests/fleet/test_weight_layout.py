"""Weights between PaddleFleet's layouts: where every entry goes, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch

from sonicmoe.fleet.weight_layout import (
    fused_grouped_w1_to_sonic,
    fused_sonic_w1_to_grouped,
    fused_transpose_w2_layout,
)

E, H, I = 3, 5, 4


def numbered(*shape, dtype=torch.float32):
    return tensor(np.arange(np.prod(shape)).reshape(shape) % 251, torch.float32).to(dtype)


def raw(value):
    """The bytes of a tensor."""
    return numpy(value.contiguous().view(torch.uint8).to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_round_trips_are_exact(dtype):
    grouped, sonic = numbered(E, H, 2 * I, dtype=dtype), numbered(E, 2 * I, H, dtype=dtype)
    down = numbered(E, I, H, dtype=dtype)
    for there, back, value in (
        (fused_grouped_w1_to_sonic, fused_sonic_w1_to_grouped, grouped),
        (fused_sonic_w1_to_grouped, fused_grouped_w1_to_sonic, sonic),
        (fused_transpose_w2_layout, fused_transpose_w2_layout, down),
    ):
        moved = there(value)
        assert moved.dtype == dtype and moved.is_contiguous()
        assert not np.array_equal(raw(moved), raw(value))
        assert np.array_equal(raw(back(moved)), raw(value))
