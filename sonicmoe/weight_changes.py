"""What the host can see of weights that were written, without waiting for a device: it guards
caches where an event was missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .interop import IS_PADDLE, is_cuda, writes_of

Tensor = torch.Tensor

_optimizer_steps = 0


def _count_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


if not IS_PADDLE:  # its proxy has no such hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_count_optimizer_step)


def optimizer_steps() -> int:
    """Steps of any `torch.optim.Optimizer` in this process so far: fused ones move no version
    counter. 0 under Paddle.
    """
    return _optimizer_steps


def weight_fingerprint(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Two checksums of every parameter's bits as integers, weighted by column and by row; on a GPU
    PyTorch's version counters.

    Any change of one value and any exchange of two shows in the checksums. Empty where nothing
    shows: on a GPU under Paddle.
    """
    if any(is_cuda(parameter) for parameter in parameters):
        return () if IS_PADDLE else _versions(parameters)
    sums = []
    for parameter in parameters:
        bits = parameter.detach().view(
            torch.int32 if parameter.dtype == torch.float32 else torch.int16
        )
        matrix = bits.reshape([-1, int(bits.shape[-1])]).to(torch.int64)
        sums += [_weighted_sum(matrix.sum(0)), _weighted_sum(matrix.sum(1))]
    return tuple(int(value) for value in torch.stack(sums).tolist()) if sums else ()


def _versions(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """0 for inference tensors, which have no counter."""
    try:
        return tuple(map(writes_of, parameters))
    except RuntimeError:
        return tuple(
            0 if parameter.is_inference() else writes_of(parameter) for parameter in parameters
        )


def _weighted_sum(values: Tensor) -> Tensor:
    positions = torch.arange(1, int(values.shape[0]) + 1, dtype=torch.int64, device=values.device)
    return (values * positions).sum()
