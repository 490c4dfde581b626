"""Writes to the weights, as far as the host can see them without waiting for a device.

| weights on | framework | what is compared |
|---|---|---|
| a host | both | checksums of all bits |
| a GPU | PyTorch | version counters, and the number of optimizer steps in the process |
| a GPU | Paddle | nothing: its optimizers write without a trace |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch

from ..interop import IS_PADDLE, is_cuda, plain_ops, writes_of

Tensor = torch.Tensor


class OptimizerWatcher(Protocol):
    """Is told of every step of a `torch.optim.Optimizer` while it is in `optimizer_watchers`."""

    def note_optimizer_step(self, updated: set[int]) -> None:
        """`updated`: ids of the parameters that the optimizer holds."""


class ChangeWatcher(Protocol):
    """Is told of writes to weights that somebody announces, while it is in `change_watchers`."""

    def note_change(self, written: set[int], event: str) -> None:
        """`written`: ids of the parameters. `event`: the announcement, in words for a message."""


optimizer_watchers: WeakSet[OptimizerWatcher] = WeakSet()
change_watchers: WeakSet[ChangeWatcher] = WeakSet()


def announce_change(parameters: Sequence[Tensor], event: str) -> None:
    """Somebody has written these parameters, or is about to."""
    written = set(map(id, parameters))
    # The list holds the watchers alive while they are called.
    for watcher in list(change_watchers):
        watcher.note_change(written, event)


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
    """A checksum of every parameter's bits as integers; on a GPU PyTorch's version counters.

    Any change of one value shows. Any other change shows with near certainty: a permutation of the
    values leaves the checksum as it was with a probability of about 2**-64. Empty where nothing
    shows: on a GPU under Paddle.
    """
    if any(map(is_cuda, parameters)):
        return () if IS_PADDLE else _versions(parameters)
    # A sum of the bits as integers modulo 2**64, because a floating sum may round a small change
    # away. The weight of a value is the product of a random odd number for its row and one for its
    # column: a sum of rows beside a sum of columns would miss a permutation matrix that becomes
    # another one.
    sums = []
    with plain_ops():
        for parameter in parameters:
            bits = parameter.detach().view(
                torch.int32 if parameter.dtype == torch.float32 else torch.int16
            )
            matrix = bits.reshape([-1, int(bits.shape[-1])]).to(torch.int64)
            rows, columns = (int(size) for size in matrix.shape)
            in_row = (matrix * _odd_numbers(columns, 1)).sum(1)
            sums.append((in_row * _odd_numbers(rows, 0)).sum())
        # One copy to the host for all parameters.
        return tuple(int(value) for value in torch.stack(sums).tolist()) if sums else ()


def writes_so_far(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """PyTorch's version counters, wherever the weights lie and also where their memory was freed;
    empty under Paddle, whose counters move when a layout is switched and not when an optimizer
    writes.
    """
    return () if IS_PADDLE else _versions(parameters)


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


@functools.lru_cache(maxsize=32)
def _odd_numbers(count: int, axis: int) -> Tensor:
    """int64 `[count]`, the same in every process. Odd, so that no change of one value is lost."""
    numbers = np.random.default_rng(axis).integers(2**63, size=count, dtype=np.int64)
    return torch.tensor(numbers | 1, device="cpu")
