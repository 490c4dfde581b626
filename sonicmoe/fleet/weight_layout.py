"""Stacked expert weights between PaddleFleet's two layouts, under the names that its layout switch
looks for. They move bytes and do no arithmetic, so a round trip is exact in every dtype.

    grouped    w1 [E, H, 2I], the gate columns first, then the up columns; w2 [E, I, H]
    Sonic      w1 [E, 2I, H], a gate row and its up row in turns;           w2 [E, H, I]

The engine reads parameters in either layout, so nothing has to be converted for it. Fleet's expert
converts anyway, and these functions do that for it.
"""

from __future__ import annotations

import torch

from ..errors import ShapeError, expect
from ..interop import plain_ops, require_framework_tensor

Tensor = torch.Tensor


def fused_grouped_w1_to_sonic(weight: Tensor) -> Tensor:
    """Grouped w1 `[E, H, 2I]` -> Sonic `[E, 2I, H]`, in fresh memory, contiguous, detached.

    Raises:
        ShapeError, FrameworkError: naming what came and what is needed.
    """
    experts, hidden, columns = _shape(weight, "[E, H, 2I]", even_axis=2)
    halves = [experts, hidden, 2, columns // 2]
    return _permuted(weight, halves, (0, 3, 2, 1), [experts, columns, hidden])


def fused_sonic_w1_to_grouped(weight: Tensor) -> Tensor:
    """Sonic w1 `[E, 2I, H]` -> grouped `[E, H, 2I]`; the inverse of `fused_grouped_w1_to_sonic`,
    with its errors.
    """
    experts, rows, hidden = _shape(weight, "[E, 2I, H]", even_axis=1)
    pairs = [experts, rows // 2, 2, hidden]
    return _permuted(weight, pairs, (0, 3, 2, 1), [experts, hidden, rows])


def fused_transpose_w2_layout(weight: Tensor) -> Tensor:
    """w2 `[E, I, H]` <-> `[E, H, I]`, in fresh memory, contiguous, detached; its own inverse.

    Raises:
        ShapeError, FrameworkError: naming what came and what is needed.
    """
    experts, rows, columns = shape = _shape(weight, "[E, I, H] or [E, H, I]")
    return _permuted(weight, list(shape), (0, 2, 1), [experts, columns, rows])


def _permuted(weight: Tensor, view: list[int], axes: tuple[int, ...], shape: list[int]) -> Tensor:
    """One copy: a stacked weight has gigabytes, and each more would be read and written again."""
    with plain_ops():
        moved = weight.detach().reshape(view).permute(*axes)
        # Axes of one element may leave the view contiguous as it is.
        moved = moved.clone() if moved.is_contiguous() else moved.contiguous()
        return moved.reshape(shape)


def _shape(weight: Tensor, needed: str, even_axis: int | None = None) -> tuple[int, int, int]:
    require_framework_tensor(weight, "weight")
    shape = tuple(int(size) for size in weight.shape)
    expect(len(shape) == 3, ShapeError, f"weight has shape {shape}; needed: {needed}")
    expect(
        even_axis is None or shape[even_axis] % 2 == 0,
        ShapeError,
        f"weight has shape {shape}; needed: {needed}, with an even size where 2I stands",
    )
    return shape[0], shape[1], shape[2]
