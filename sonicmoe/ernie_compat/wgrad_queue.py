"""Weight gradients that do not hold up dx: on a GPU a side stream computes them while the caller's stream goes on to the combine.

On a host there is nothing to overlap with: they wait until they are asked for, so that a schedule may place them (a pipeline bubble).
Order is the order of the backwards, so results are the same bits as without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..engine.interface import PendingWgrad
from ..interop import is_cuda

Tensor = torch.Tensor


class WgradQueue:
    """The weight gradients of one node that have been handed over and not yet waited for."""

    def __init__(self) -> None:
        """Makes no stream before the first GPU tensor."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._stream: torch.cuda.Stream | None = None
        self._on_stream = False
        self._held: list[Tensor] = []

    def submit(self, pending: PendingWgrad, compute: Callable[[], None]) -> None:
        """Take over `compute`, which reads `pending` and adds into accumulators that are already allocated."""
        if pending.dout is None or not is_cuda(pending.dout):
            self._waiting.append(compute)
            return
        stream = self._side_stream(pending.dout)
        stream.wait_stream(torch.cuda.current_stream())
        for tensor in tensors_in(pending):
            if hasattr(
                tensor, "record_stream"
            ):  # or its memory would be the caller's stream's again as soon as it is dropped
                tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            compute()
        self._on_stream = True

    def finish(self) -> None:
        """Everything handed over is done, or ordered before whatever the caller launches next; waits for nothing on the host."""
        while self._waiting:
            self._waiting.popleft()()
        if self._on_stream and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._on_stream = False
            self._held.clear()

    def _side_stream(self, tensor: Tensor) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=tensor.device)
        return self._stream


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses and sequences: engines keep their operands in forms of their own."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
