"""What the kernel tests share: outputs that must be written, and the error of each block of 128
rows.
"""

from __future__ import annotations

import torch


def poisoned(shape, dtype):
    """Fresh memory that reads as NaN, or as the byte 0x7F."""
    if dtype in (torch.int8, torch.uint8):
        return torch.full(shape, 0x7F, dtype=dtype, device="cuda")
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def block_errors(actual, wanted):
    """Relative RMSE of each 128-row block; a block of zeros must be zero."""
    difference = (actual.double() - wanted).reshape(-1, 128, wanted.shape[1]).norm(dim=(1, 2))
    norm = wanted.reshape(-1, 128, wanted.shape[1]).norm(dim=(1, 2))
    return torch.where(norm > 0, difference / norm.clamp(min=1e-300), difference)
