"""Stacked expert weights between PaddleFleet's two layouts, under the names that its layout switch
looks for. They move bytes and do no arithmetic, so a round trip is exact in every dtype.

    grouped    w1 [E, H, 2I], the gate columns first, then the up columns; w2 [E, I, H]
    Sonic      w1 [E, 2I, H], a gate row and its up row in turns;           w2 [E, H, I]

The engine reads parameters in either layout, so nothing has to be converted for it. Fleet's expert
converts anyway, and these functions do that for it.
"""

from __future__ import annotations

import torch

from ..interop import require_framework_tensor
from ..layouts import reordered
from ..refusals import need_shape

Tensor = torch.Tensor


def fused_grouped_w1_to_sonic(weight: Tensor) -> Tensor:
    """Grouped w1 `[E, H, 2I]` -> Sonic `[E, 2I, H]`, in fresh memory, contiguous, detached.

    Raises:
        ShapeError, FrameworkError: naming what came and what is needed.
    """
    experts, hidden, columns = _shape(weight, "[E, H, 2I]", even_axis=2)
    # G is the pair of gate and up: the outer axis of the columns there, the inner one of the rows.
    parts = {"E": experts, "H": hidden, "G": 2, "I": columns // 2}
    return reordered(weight, "EHGI", "EIGH", parts)


def fused_sonic_w1_to_grouped(weight: Tensor) -> Tensor:
    """Sonic w1 `[E, 2I, H]` -> grouped `[E, H, 2I]`; the inverse of `fused_grouped_w1_to_sonic`,
    with its errors.
    """
    experts, rows, hidden = _shape(weight, "[E, 2I, H]", even_axis=1)
    parts = {"E": experts, "I": rows // 2, "G": 2, "H": hidden}
    return reordered(weight, "EIGH", "EHGI", parts)


def fused_transpose_w2_layout(weight: Tensor) -> Tensor:
    """w2 `[E, I, H]` <-> `[E, H, I]`, in fresh memory, contiguous, detached; its own inverse.

    Raises:
        ShapeError, FrameworkError: naming what came and what is needed.
    """
    parts = dict(zip("EIH", _shape(weight, "[E, I, H] or [E, H, I]"), strict=True))
    return reordered(weight, "EIH", "EHI", parts)


def _shape(weight: Tensor, needed: str, even_axis: int | None = None) -> tuple[int, int, int]:
    require_framework_tensor(weight, "weight")
    shape = tuple(int(size) for size in weight.shape)
    need_shape(len(shape) == 3, "weight", weight, needed)
    even = even_axis is None or shape[even_axis] % 2 == 0
    need_shape(even, "weight", weight, f"{needed}, with an even size where 2I stands")
    return shape[0], shape[1], shape[2]
