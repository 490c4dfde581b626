"""Weight gradients that are computed beside the operations that consume dx.

    host             dx kernels, submit | combine | hook: launch | other layers ... | finish
    caller's stream  [dx kernels]──ready──[combine]────[other layers ...]──────────────wait──►
    side stream                      └───────wait──[dw2][dw1]────────────────────────────┘

On a GPU a side stream computes them. Their kernels fill every multiprocessor, so a collective
launched behind them would wait for them. An autograd hook therefore launches them after the
operation that takes dx, which is normally the combine. On a host nothing runs beside anything, so
they wait until a schedule asks for them (`finish`), for example in a pipeline bubble.

They are added in the order of the backwards, so sums have the same bits as without the queue.

A computation that raises has added nothing if memory ran out (`Engine.backward_dw`). Then its task
goes on waiting, and the next call tries again. Only where the backward of the task itself raises is
it dropped: that backward will be repeated, or skipped, as a whole.
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
from ..quant.format import BlockScaledTensor
from ..quant.tokens import anchor_of

Tensor = torch.Tensor


@dataclass(eq=False)
class _Task:
    """Weight gradients of one backward.

    ready: the event on the caller's stream after which the operands exist; None on a host.
    tensors: everything that `compute` reads or adds to. It must live until the side stream is done,
        also where its owner drops it.
    writes: on a host, where `compute` runs late, the version counters of the caller's tensors.
        Under Paddle a detached tensor counts its own writes only, so these never move.
    """

    compute: Callable[[], None]
    pending: PendingWgrad
    ready: Any
    tensors: list[Tensor]
    writes: list[int]


class WgradQueue:
    """The weight gradients of one node that have been handed over and not yet waited for."""

    def __init__(self) -> None:
        """Makes no stream before the first GPU tensor."""
        self._waiting: deque[_Task] = deque()
        self._stream: torch.cuda.Stream | None = None
        self._on_stream = False
        self._held: list[Tensor] = []

    def __reduce__(self) -> tuple[type[WgradQueue], tuple[()]]:
        """A copy has no backward behind it."""
        return WgradQueue, ()

    def submit(self, pending: PendingWgrad, compute: Callable[[], None]) -> None:
        """Take over `compute`: a partial over `pending` and over accumulators that are already
        allocated.
        """
        # A task of an earlier backward still waits where autograd ended before its hook fired. It
        # goes now, because it holds its operands alive.
        self.launch()
        if pending.dout is None or not is_cuda(anchor_of(pending.dout)):
            # On a host `compute` runs late and reads these two, which the caller owns and may
            # refill. Their version counters, taken now, show that at `finish`.
            self._waiting.append(_Task(compute, pending, None, [], _writes_to(pending)))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=anchor_of(pending.dout).device)
        # Recorded on the caller's stream: at this point its kernels have produced every operand,
        # and have zeroed new accumulators.
        ready = torch.cuda.current_stream().record_event()
        # The accumulators are among the arguments of `compute`. The keys keep each tensor once.
        kept = {id(tensor): tensor for tensor in tensors_in([pending, compute])}
        self._waiting.append(_Task(compute, pending, ready, list(kept.values()), []))

    def launch_after(self, following: Any) -> None:
        """Launch once autograd has run the node `following`, which takes dx; None: at once."""
        if not self._waiting or self._waiting[-1].ready is None:
            return
        task = self._waiting[-1]
        if following is None:
            self._launch_or_drop(task)
            return
        # The hook removes itself after one use, because the same node runs again where the graph is
        # retained. Its handle exists only after it is registered, hence the list.
        handles: list[Any] = []

        def launch(*_gradients: Any) -> None:
            handles.pop().remove()
            self._launch_or_drop(task)

        handles.append(following.register_hook(launch))

    def launch(self) -> None:
        """Put every waiting GPU task on the side stream; tasks of a host go on waiting."""
        while self._waiting and self._waiting[0].ready is not None:
            task = self._waiting[0]
            stream = self._stream
            assert stream is not None
            # A wait on the device. The host goes on at once.
            stream.wait_event(task.ready)
            self._keep(task.tensors, stream)
            # an engine that frees operands one by one must hold the last reference
            task.tensors.clear()
            with torch.cuda.stream(stream):
                # `current_stream` is the side stream inside the block, so the engine launches
                # there.
                self._compute(task)
            self._on_stream = True

    def finish(self) -> None:
        """Complete every task: on a host now, on a GPU by ordering the caller's next launches
        behind the side stream. The host waits for nothing.
        """
        self.launch()
        while self._waiting:
            task = self._waiting[0]
            # The dx of this backward is right, and its weight gradients would be of other tokens.
            if _writes_to(task.pending) != task.writes:
                self._waiting.popleft()
                raise RuntimeError(
                    "tokens, or the gradient of the output, were overwritten after backward() and before finish_wgrad() or step(): with "
                    "split_wgrad the weight gradients are computed from them then; their gradients are lost"
                )
            self._compute(task)
        if self._on_stream and self._stream is not None:
            # After this wait nothing on the caller's stream overtakes the side stream, so tensors
            # that were held for it may go.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._on_stream = False
            self._held.clear()

    def discard(self) -> None:
        """Drop every task that waits. The caller's next launches are ordered behind tasks that
        already run on the side stream.
        """
        # Cleared first, so that `finish` has nothing to compute and only orders the two streams.
        self._waiting.clear()
        self.finish()

    def _compute(self, task: _Task) -> None:
        """Run the first task. It goes on waiting where memory was missing and it still has its
        operands.
        """
        repeatable = False
        try:
            task.compute()
        except MemoryError:
            repeatable = task.pending.dout is not None
            raise
        finally:
            if not repeatable:
                self._waiting.popleft()

    def _launch_or_drop(self, task: _Task) -> None:
        """Launch from inside the backward of `task`."""
        try:
            self.launch()
        except BaseException:
            if task in self._waiting:
                self._waiting.remove(task)
            raise

    def _keep(self, tensors: list[Tensor], stream: Any) -> None:
        """Keep the tensors' memory from reuse until `stream` has read it. Where the allocator
        cannot do that (Paddle), they are held until `finish`.
        """
        for tensor in tensors:
            # PyTorch's allocator does not hand a freed block out again before the side stream has
            # done the work that was queued on it. Paddle has no such call, so a reference keeps the
            # memory.
            if hasattr(tensor, "record_stream"):
                tensor.record_stream(stream)
            else:
                self._held.append(tensor)


def _writes_to(pending: PendingWgrad) -> list[int]:
    """How often the caller's tensors among the operands were written."""
    return [writes_of(tensor) for tensor in tensors_in((pending.x, pending.dout))]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses, sequences and arguments of partials: engines keep their
    operands in forms of their own.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, BlockScaledTensor):
        yield from value.parts
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, partial):
        yield from tensors_in(value.args)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
