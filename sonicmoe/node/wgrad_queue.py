"""Weight gradients that do not hold up dx: on a GPU a side stream computes them while the caller's
stream goes on to the combine.

Their kernels fill every multiprocessor, and a collective launched behind them would wait: they are
launched once autograd has run whatever takes dx, that is, behind the combine. On a host there is
nothing to overlap with: they wait until they are asked for, so that a schedule may place them (a
pipeline bubble). Order is the order of the backwards, so results are the same bits as without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch

from ..engine.interface import PendingWgrad
from ..interop import is_cuda, writes_of

Tensor = torch.Tensor


@dataclass(eq=False)
class _Task:
    """Weight gradients of one backward. ready: the event on the caller's stream after which
    operands are there; None on a host.

    tensors: everything `compute` reads or adds into, which must live until the side stream has done
    so, whoever else drops it.
    versions: of the caller's tensors among them, on a host, where they are read late; under Paddle
    they never move.
    """

    compute: Callable[[], None]
    ready: Any
    tensors: list[Tensor]
    versions: list[tuple[Tensor, int]]


class WgradQueue:
    """The weight gradients of one node that have been handed over and not yet waited for."""

    def __init__(self) -> None:
        """Makes no stream before the first GPU tensor."""
        self._waiting: deque[_Task] = deque()
        self._stream: torch.cuda.Stream | None = None
        self._on_stream = False
        self._held: list[Tensor] = []

    def submit(self, pending: PendingWgrad, compute: Callable[[], None]) -> None:
        """Take over `compute`: a partial over `pending` and over accumulators that are already
        allocated.
        """
        self.launch()
        if pending.dout is None or not is_cuda(pending.dout):
            read = [tensor for tensor in (pending.x, pending.dout) if tensor is not None]
            self._waiting.append(
                _Task(compute, None, [], [(tensor, writes_of(tensor)) for tensor in read])
            )
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=pending.dout.device)
        ready = torch.cuda.current_stream().record_event()
        kept = {id(tensor): tensor for tensor in tensors_in([pending, compute])}
        self._waiting.append(_Task(compute, ready, list(kept.values()), []))

    def launch_after(self, following: Any) -> None:
        """Launch once autograd has run the node `following`, which takes dx; None: at once."""
        if following is None or not self._waiting or self._waiting[-1].ready is None:
            self.launch()
            return
        handles: list[Any] = []

        def launch(*_gradients: Any) -> None:
            handles.pop().remove()
            self.launch()

        handles.append(following.register_hook(launch))

    def launch(self) -> None:
        """Put on the side stream what a GPU is to compute; what a host is to compute goes on
        waiting.
        """
        while self._waiting and self._waiting[0].ready is not None:
            task = self._waiting.popleft()
            stream = self._stream
            assert stream is not None
            stream.wait_event(task.ready)
            self._keep(task.tensors, stream)
            # an engine that frees operands one by one must hold the last reference
            task.tensors.clear()
            with torch.cuda.stream(stream):
                task.compute()
            self._on_stream = True

    def finish(self) -> None:
        """Everything handed over is done, or ordered before whatever the caller launches next;
        waits for nothing on the host.
        """
        self.launch()
        while self._waiting:
            task = self._waiting.popleft()
            if any(writes_of(tensor) != writes for tensor, writes in task.versions):
                raise RuntimeError(
                    "tokens, or the gradient of the output, were overwritten after backward() and before finish_wgrad() or step(): with "
                    "split_wgrad the weight gradients are computed from them then; their gradients are lost"
                )
            # an engine that frees operands one by one must hold the last reference
            task.versions.clear()
            task.compute()
        if self._on_stream and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._on_stream = False
            self._held.clear()

    def discard(self) -> None:
        """Compute nothing of what waits; what runs on the side stream is ordered before whatever
        the caller launches next.
        """
        self._waiting.clear()
        self.finish()

    def _keep(self, tensors: list[Tensor], stream: Any) -> None:
        """Their memory must not be the caller's stream's again before `stream` is through; held
        until `finish` where no allocator helps.
        """
        for tensor in tensors:
            if hasattr(tensor, "record_stream"):
                tensor.record_stream(stream)
            else:
                self._held.append(tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses, sequences and arguments of partials: engines keep their
    operands in forms of their own.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, partial):
        yield from tensors_in(value.args)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
