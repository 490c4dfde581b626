"""What announces a write to the weights, and the traces of writes that PyTorch leaves.

docs/design.md, "Stale weights", has the table of events. Nothing here reads a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from ..interop import IS_PADDLE, writes_of

Tensor = torch.Tensor


class ChangeWatcher(Protocol):
    """Is told of writes to weights that somebody announces, while it is in `change_watchers`."""

    def note_change(self, written: set[int], event: str) -> None:
        """`written`: ids of the parameters. `event`: the announcement, in words for a message."""


change_watchers: WeakSet[ChangeWatcher] = WeakSet()


def announce_change(parameters: Sequence[Tensor], event: str) -> None:
    """Somebody has written these parameters, or is about to."""
    written = set(map(id, parameters))
    # The list holds the watchers alive while they are called.
    for watcher in list(change_watchers):
        watcher.note_change(written, event)


OPTIMIZER_STEPPED = "an optimizer stepped"
_optimizer_steps = 0


def _optimizer_stepped(optimizer: Any, *_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1
    # Nearly always nobody watches, and this hook runs in every optimizer step of the process.
    if change_watchers:
        groups = optimizer.param_groups
        held = [parameter for group in groups for parameter in group["params"]]
        announce_change(held, OPTIMIZER_STEPPED)


if not IS_PADDLE:  # its proxy has no such hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_optimizer_stepped)


class Traces(NamedTuple):
    """The traces of writes that the host sees in some weights, wherever they lie and also where
    their memory was freed. Equal to earlier ones where no write showed in between.

    versions: PyTorch's counters; empty under Paddle, whose optimizers do not move them.
    optimizer_steps: of any `torch.optim.Optimizer` in this process, because fused ones write
        weights without moving a counter.
    """

    versions: tuple[int, ...] = ()
    optimizer_steps: int = 0


def traces_of(parameters: Sequence[Tensor]) -> Traces:
    """The traces that the host sees now."""
    if IS_PADDLE:
        return Traces()
    try:  # the usual case of `versions_of`
        return Traces(tuple(map(writes_of, parameters)), _optimizer_steps)
    except RuntimeError:
        return Traces(versions_of(parameters), _optimizer_steps)


def versions_of(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each was written in place; 0 for inference tensors, which have no counter."""
    try:
        # The usual case without a test per tensor. Reading the counter of an inference tensor
        # raises.
        return tuple(map(writes_of, parameters))
    except RuntimeError:
        return tuple(
            0 if parameter.is_inference() else writes_of(parameter) for parameter in parameters
        )
