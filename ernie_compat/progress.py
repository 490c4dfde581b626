"""For the person who watches a run: lines of progress, and a guard that turns Ctrl-C into a
checkpoint.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from rich.console import Console

from .metrics import StepRecord
from .model_config import SMOOTHING_WINDOW

LINES = 20
PATIENCE_S = 10.0  # the longest silence of a run whose steps are shorter


class InterruptGuard:
    """Turns the first SIGINT, SIGTERM or SIGHUP (a lost terminal) into a polite request; a second
    SIGINT raises KeyboardInterrupt. A context manager.

    Attributes:
        received: the signal's number, 0 until one came.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, console: Console) -> None:
        """`console` gets the one line that announces the stop."""
        self.received = 0
        self._console = console
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptGuard:
        # `nohup` ignores SIGHUP for its command, so that a run outlives its terminal. It stays so.
        for name in self.SIGNALS:
            if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:
                self._previous[name] = signal.signal(name, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only Ctrl-C counts a second time; a repeated SIGTERM changes nothing.
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        self._console.print(
            "stopping after this step to save a checkpoint; press Ctrl-C again to stop without one"
        )


class TrainingDisplay:
    """Loss, tokens/s and expert load: some twenty lines of a run, or one every ten seconds."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console, self._total = console, total_steps
        self._recent: list[StepRecord] = []
        self._printed = time.monotonic()

    def update(self, record: StepRecord) -> None:
        """Take one more step, and say where the run is when it is time."""
        self._recent = [*self._recent, record][-SMOOTHING_WINDOW:]
        every = max(1, self._total // LINES)
        # More lines where steps are slow: silence looks like a process that hangs.
        waited = time.monotonic() - self._printed >= PATIENCE_S
        if waited or record.step % every == 0 or record.step in (1, self._total):
            self._printed = time.monotonic()
            self._console.print(self._line(record))

    def _line(self, last: StepRecord) -> str:
        """In few words, because a terminal has 80 columns: loss, full-precision loss, tokens/s over the
        recent steps, the load of the busiest expert over the mean, and seconds until the end.
        """
        recent, exact = self._recent, last.full_precision_loss
        reference = "" if exact is None else f" (full {exact:.4f})"
        own = sum(record.seconds for record in recent)
        took = own + sum(record.full_precision_seconds or 0.0 for record in recent)
        # The mean of the rates would count short steps as much as long ones.
        rate = sum(record.tokens_per_s * record.seconds for record in recent) / own / 1000
        left = (self._total - last.step) * took / len(recent)
        return (
            f"step {last.step}/{self._total} loss {last.loss:.4f}{reference}, {rate:.1f}k tok/s, "
            f"load {last.load_imbalance:.1f}x" + (f", {left:.0f} s left" if left else "")
        )
