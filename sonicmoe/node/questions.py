"""Two questions to the log, once per process, about mistakes that nothing else shows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ..interop import IS_PADDLE, is_cuda
from ..log import log_once

BACKWARDS, STEPS = 64, 8  # no usual loop has so many


class Questions:
    """Of one layer. steps: how often `step()` came. uncleared: so often `main_grad` was full when
    the next step began; below 0 once it was not.
    """

    steps = uncleared = seen = 0

    def at_backward(self, trained: Iterable[Any], waiting: int) -> None:
        """One begins for weights that train; the gradients of so many others wait."""
        if waiting == BACKWARDS and not self.steps:
            _ask(f"step() never came, and no optimizer gets the gradients of {waiting} backwards")
        if not IS_PADDLE or self.uncleared < 0 or self.seen == self.steps:
            return
        # Reading a value on a GPU would wait for it, so nobody is asked there.
        main_grads = (getattr(weight, "main_grad", None) for weight in trained)
        held = next((held for held in main_grads if held is not None), None)
        is_full = held is not None and not is_cuda(held) and bool((held != 0).any())
        self.seen, self.uncleared = self.steps, self.uncleared + 1 if is_full else -1
        if self.uncleared == STEPS:
            _ask("no optimizer clears main_grad of the expert weights: does it read .grad alone?")


def _ask(question: str) -> None:
    log_once(logging.WARNING, "%s (docs/gradients.md)", question, key=_ask)
