"""Two questions to the log, once per process, about mistakes that nothing else shows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ..gradients.batch import GradientBatch
from ..interop import IS_PADDLE, is_cuda, writes_of
from ..log import first_time, log_once

# No loop has so many micro-batches. Where an optimizer announces its steps nobody waits for them.
BACKWARDS = 4096
STEPS = 8


class Questions:
    """The state of both questions about one layer.

    steps: how often `step()` came. uncleared: how many steps have begun with the `main_grad` that the
        one before left; below 0 where nobody asks that, or it was answered. seen: `steps` when a
        backward looked last. left: the identity of that memory. sum: of its values. same: whether
        all those sums stayed and were not 0. The last two are on its device.
    """

    steps = uncleared = seen = 0
    left: tuple[Any, ...] = ()
    sum: Any = None
    same: Any = None

    def at_backward(self, batch: GradientBatch, waiting: int) -> None:
        """One begins; the gradients of so many others wait."""
        if waiting == BACKWARDS:
            self.at_optimizer(waiting)
        if not IS_PADDLE or self.uncleared < 0 or self.seen == self.steps:
            return
        # Others may have added to it, or put something there, before this backward: another node of
        # the same experts, or a trainer that starts it with the weight decay.
        self.seen, (found, total) = self.steps, _state_of(batch.added)
        if not found or found != self.left:
            self.uncleared = -1
            return
        # On a GPU one layer of the process asks, because each sum reads the gradient of a weight.
        if not self.uncleared and is_cuda(total) and not first_time(Questions):
            self.uncleared = -1
            return
        stayed = (total == self.sum) & (total != 0)
        self.same = stayed if self.same is None else self.same & stayed
        self.uncleared += 1
        if self.uncleared == STEPS:
            self.uncleared = -1
            # The only value that is read here; on a GPU the host waits for it once.
            if bool(self.same):
                _ask(
                    "no optimizer clears main_grad of the expert weights: does it read .grad alone?"
                )

    def at_optimizer(self, waiting: int) -> None:
        """One that holds the weights stepped, while the gradients of so many backwards wait."""
        if waiting and not self.steps:
            _ask(f"step() never came, and no optimizer gets the gradients of {waiting} backwards")

    def at_step(self, parameters: Iterable[Any]) -> None:
        """`step()` came; parameters: of the layer, which are looked at only where that is asked."""
        self.steps += 1
        if IS_PADDLE and self.uncleared >= 0:
            self.left, self.sum = _state_of(parameters)


def _state_of(weights: Iterable[Any]) -> tuple[tuple[Any, ...], Any]:
    """What identifies one `main_grad`, empty where there is none, and the sum of its values on its
    device.
    """
    main_grads = (getattr(weight, "main_grad", None) for weight in weights)
    held = next((held for held in main_grads if held is not None), None)
    # Writes too, because equal gradients may come again, and a sum, because Paddle does not count all.
    return ((), None) if held is None else ((id(held), writes_of(held)), held.sum())


def _ask(question: str) -> None:
    log_once(logging.WARNING, "%s (docs/gradients.md)", question, key=_ask)
