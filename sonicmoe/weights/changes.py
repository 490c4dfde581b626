"""Writes to the weights, as far as the host can see them without waiting for a device.

| weights on | framework | what is compared |
|---|---|---|
| a host | both | checksums of all bits |
| a GPU | PyTorch | version counters, and the number of optimizer steps in the process |
| a GPU | Paddle | nothing: its optimizers write without a trace |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from ..interop import IS_PADDLE, is_cuda, writes_of

Tensor = torch.Tensor


class OptimizerWatcher(Protocol):
    """Is told of every step of a `torch.optim.Optimizer` while it is in `optimizer_watchers`."""

    def note_optimizer_step(self, updated: set[int]) -> None:
        """`updated`: ids of the parameters that the optimizer holds."""


optimizer_watchers: WeakSet[OptimizerWatcher] = WeakSet()
_optimizer_steps = 0


def _optimizer_stepped(optimizer: Any, *_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1
    # The list holds the watchers alive while they are called. The ids are collected only when
    # somebody watches, because this hook runs in every optimizer step of the process.
    watchers = list(optimizer_watchers)
    if watchers:
        groups = optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        for watcher in watchers:
            watcher.note_optimizer_step(updated)


if not IS_PADDLE:  # its proxy has no such hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_optimizer_stepped)


def optimizer_steps() -> int:
    """Steps of any `torch.optim.Optimizer` in this process so far. Fused optimizers write weights
    without moving a version counter, so a cache compares this number too. 0 under Paddle.
    """
    return _optimizer_steps


class Seen(NamedTuple):
    """The traces of writes that the host saw in some weights; equal to an earlier one if no write
    showed in between.

    marks: checksums or version counters; empty where writes leave no trace.
    """

    marks: tuple[int | None, ...]
    optimizer_steps: int


def look(parameters: Sequence[Tensor]) -> Seen:
    """The traces that the host sees now. On a host checksums find every write, so steps of
    optimizers, which may be other models', are left out.
    """
    on_gpu = is_cuda(parameters[0])
    return Seen(weight_fingerprint(parameters), _optimizer_steps if on_gpu else 0)


def weight_fingerprint(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Two checksums of every parameter's bits as integers, weighted by column and by row; on a GPU
    PyTorch's version counters.

    Any change of one value and any exchange of two shows in the checksums. Empty where nothing
    shows: on a GPU under Paddle.
    """
    if any(is_cuda(parameter) for parameter in parameters):
        return () if IS_PADDLE else _versions(parameters)
    # Sums of the bits as integers, because a floating sum may round a small change away. An
    # exchange of two values within a column shows in the sums of the rows only, and one within a
    # row in those of the columns only.
    sums = []
    for parameter in parameters:
        bits = parameter.detach().view(
            torch.int32 if parameter.dtype == torch.float32 else torch.int16
        )
        matrix = bits.reshape([-1, int(bits.shape[-1])]).to(torch.int64)
        sums += [_weighted_sum(matrix.sum(0)), _weighted_sum(matrix.sum(1))]
    # One copy to the host for all parameters.
    return tuple(int(value) for value in torch.stack(sums).tolist()) if sums else ()


def _versions(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """0 for inference tensors, which have no counter."""
    try:
        # The usual case without a test per tensor. Reading the counter of an inference tensor
        # raises.
        return tuple(map(writes_of, parameters))
    except RuntimeError:
        return tuple(
            0 if parameter.is_inference() else writes_of(parameter) for parameter in parameters
        )


def _weighted_sum(values: Tensor) -> Tensor:
    positions = torch.arange(1, int(values.shape[0]) + 1, dtype=torch.int64, device=values.device)
    return (values * positions).sum()
