"""Weight gradients that are added after their backward: where a schedule takes them one by one
(`OfferedWgrad`), and where a side stream computes them beside the operations that consume dx
(`WgradQueue`, for `split_wgrad`).

**Offered.** A framework fires the hooks of every weight that is an input of an autograd node when
the backward of that node ends, before an addition that a schedule puts into a pipeline bubble. So a
call whose gradients are offered does not take its weights as inputs, and the hooks of weights that
the schedule leaves here are fired here. The destination of a gradient is looked up when it is
added: by then `main_grad` may be another tensor.

    backward ── offer(down) ──► taken: the schedule runs it, then fires the hooks
             └─ offer(up) ────► left:  added now, then the hooks are fired here

Megatron-Core's schedule takes all gradients of a backward at once (`WgradStore`).

**Queued.** Their kernels fill every multiprocessor, so a collective launched behind them would wait
for them. An autograd hook therefore launches them after the operation that takes dx, which is
normally the combine. They are added in the order of the backwards, so sums have the same bits as
without the queue. On a host nothing runs beside anything, so the backward adds them itself.

    host             dx kernels, submit | combine | hook: launch | other layers ... | finish
    caller's stream  [dx kernels]──ready──[combine]────[other layers ...]──────────────wait──►
    side stream                      └───────wait──[dw2][dw1]────────────────────────────┘
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch

from ..borrowed import Borrowed
from ..config import SonicMoEConfig
from ..engine.interface import Engine, EngineSettings, PendingWgrad
from ..errors import LayoutError
from ..gradients.batch import Batch, has_main_grad
from ..gradients.sink import GradientSink
from ..interop import is_cuda, requires_grad
from ..out_of_memory import advising
from ..quant.format import BlockScaledTensor
from ..quant.tokens import anchor_of

Tensor = torch.Tensor


class WgradOffer(Protocol):
    """Asked once per weight and backward whether it takes the addition of its gradient."""

    def __call__(self, position: int, weight: Tensor, run: Callable[[], None]) -> bool:
        """`position` of the weight among the layer's parameters; `run` adds the gradient, and is to
        be called once by whoever returns True.
        """
        ...


class WgradWork(NamedTuple):
    """What an addition needs besides its operands: no activation, and not the engine weights."""

    sink: GradientSink
    config: SonicMoEConfig
    engine: Engine
    settings: EngineSettings
    parameters: Sequence[Tensor]

    def offer(
        self, offer: WgradOffer | WgradStore, trained: Sequence[bool], pending: PendingWgrad
    ) -> None:
        """Offer the gradients of those weights that `trained` marks, and add now what is left."""
        if isinstance(offer, WgradStore):
            offer.put(self, trained, pending)
            return
        left = [False] * len(trained)
        # The down-projection first: a backward through two operations would come to it first.
        positions = range(len(trained) - 1, -1, -1)
        for position in positions:
            run = OfferedWgrad(self, position, pending)
            left[position] = trained[position] and not offer(position, run.weight, run)
        if any(left):
            self.add(left, pending)
        for position in positions:
            if left[position]:
                fire_hooks(self.parameters[position])

    def add(self, trained: list[bool], pending: PendingWgrad) -> list[Tensor | None]:
        """Add the gradients of weights that are no inputs of the autograd node to `main_grad`. Returns
        what their `.grad` is to be for the hooks that take it, None where these need none.
        """
        if not all(map(has_main_grad, compress(self.parameters, trained))):
            raise LayoutError(
                "main_grad of an expert weight was removed between the forward and the addition of "
                "its gradient; needed: the attribute, which may be None"
            )
        assert pending.dout is not None
        dout = anchor_of(pending.dout)
        with (
            advising("weight gradients", self.settings),
            self.config.activate(),
            self.sink.alone(dout),
        ):
            batch = self.sink.open(self.engine, self.settings, self.parameters, trained, dout)
            self.sink.add(self.engine, pending, batch)
            return self.sink.close(batch)

    def add_to(self, batch: Batch, pending: PendingWgrad) -> None:
        """Add the gradients of a backward that is over to what it opened."""
        try:
            with advising("weight gradients", self.settings), self.config.activate():
                self.sink.add(self.engine, pending, batch)
        except Exception:
            # Stage-wise memory may have freed operands already. The backward makes no others, so
            # the sums can never be complete.
            if pending.dout is None:
                self.sink.give_up()
            raise


class OfferedWgrad:
    """The gradient of one weight, still to be added. It keeps the operands of its backward alive
    until it has run; those of the two weights of a backward are the same tensors.
    """

    def __init__(self, work: WgradWork, position: int, pending: PendingWgrad) -> None:
        """`pending` is copied, because an engine lets go of operands that it has used up."""
        self._work, self._position = work, position
        self._pending: PendingWgrad | None = copy.copy(pending)
        self._read = _borrowed(pending)
        self.weight = work.parameters[position]

    def __call__(self) -> None:
        """Add the gradient to `main_grad` of the weight.

        Raises:
            RuntimeError: it was added already, or x or dout was written or freed since the backward.
            LayoutError: the weight has no `main_grad` any more.
            OutOfMemoryError: nothing was added, and it may be called again.
        """
        if self._pending is None:
            raise RuntimeError(
                f"the gradient of expert weight {self._position} was added before; needed: one run "
                "of each offer"
            )
        self._read.check(_LATE)
        count = len(self._work.parameters)
        trained = [position == self._position for position in range(count)]
        # Another copy, so that a run that found no memory may be repeated.
        self._work.add(trained, copy.copy(self._pending))
        self._pending = None


class WgradStore:
    """The weight gradients of backwards whose schedule asks for them later, all of one backward at a
    time. Each keeps its operands alive until it was run.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[WgradWork, list[bool], PendingWgrad, Borrowed]] = deque()

    def __reduce__(self) -> tuple[type[WgradStore], tuple[()]]:
        """A copy has no backward behind it."""
        return WgradStore, ()

    def put(self, work: WgradWork, trained: Sequence[bool], pending: PendingWgrad) -> None:
        """Keep the gradients of a backward that is over."""
        self._waiting.append((work, list(trained), pending, _borrowed(pending)))

    def run(self) -> None:
        """Add the gradients of the oldest backward that waits, if one does, and give each weight the
        `.grad` that its hooks look for. Running out of memory adds nothing, and it still waits.
        """
        if not self._waiting:
            return
        work, trained, pending, read = self._waiting[0]
        read.check(_LATE)
        # A copy, because an engine lets go of operands that it has used up.
        for weight, gradient in zip(
            work.parameters, work.add(trained, copy.copy(pending)), strict=True
        ):
            if gradient is not None:
                weight.grad = gradient
        self._waiting.popleft()


_LATE = "a backward and the addition of its weight gradients, which was put off"


def _borrowed(pending: PendingWgrad) -> Borrowed:
    """The tokens and the gradient of the output, which are the caller's as a rule."""
    operands = (("x", pending.x), ("dout", pending.dout))
    return Borrowed((name, part) for name, operand in operands for part in tensors_in(operand))


def fire_hooks(weight: Tensor) -> None:
    """What Paddle does at the end of a backward for a weight that is an input of its node. PyTorch
    has no such call.
    """
    if requires_grad(weight) and hasattr(weight, "_apply_backward_hook"):
        weight._apply_backward_hook()


class _Task(NamedTuple):
    """Weight gradients of one backward.

    ready: the event on the caller's stream after which the operands exist.
    tensors: everything that the addition reads or adds to. It must live until the side stream is
        done, also where its owner drops it.
    """

    work: WgradWork
    pending: PendingWgrad
    batch: Batch
    ready: Any
    tensors: list[Tensor]


class WgradQueue:
    """The weight gradients of one node that a side stream has yet to compute, or that it computes."""

    def __init__(self) -> None:
        """Makes no stream before the first GPU tensor."""
        # One at most: the next backward launches it.
        self._waiting: _Task | None = None
        self._stream: torch.cuda.Stream | None = None
        self._on_stream = False
        self._held: list[Tensor] = []

    def __reduce__(self) -> tuple[type[WgradQueue], tuple[()]]:
        """A copy has no backward behind it."""
        return WgradQueue, ()

    def submit(self, work: WgradWork, pending: PendingWgrad, batch: Batch) -> None:
        """Take over the addition of `pending` to the memory that `batch` has opened."""
        # A task of an earlier backward still waits where autograd ended before its hook fired. It
        # goes now, because it holds its operands alive.
        self.launch()
        assert pending.dout is not None
        dout = anchor_of(pending.dout)
        if not is_cuda(dout):
            work.sink.add(work.engine, pending, batch)
            return
        # The launch takes small clusters: while a collective holds some multiprocessors, no CTA
        # with a fixed share of the work waits for them.
        pending.shares_gpu = True
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=dout.device)
        # Recorded on the caller's stream: at this point its kernels have produced every operand,
        # and have zeroed new accumulators.
        ready = torch.cuda.current_stream().record_event()
        # The keys keep each tensor once.
        kept = {id(tensor): tensor for tensor in tensors_in([pending, batch])}
        self._waiting = _Task(work, pending, batch, ready, list(kept.values()))

    def launch_after(self, following: Any) -> None:
        """Launch once autograd has run the node `following`, which takes dx; None: at once."""
        task = self._waiting
        if task is None:
            return
        handles: list[Any] = []

        def launch(*_gradients: Any) -> None:
            # One use, because the same node runs again where the graph is retained. The handle
            # exists only after the hook is registered, hence the list.
            if handles:
                handles.pop().remove()
            try:
                self.launch()
            except BaseException:
                # From inside the backward of the task, which fails with it.
                if self._waiting is task:
                    self._waiting = None
                raise

        if following is None:
            launch()
        else:
            handles.append(following.register_hook(launch))

    def launch(self) -> None:
        """Put what waits on the side stream. It goes on waiting where memory was missing and it
        still has its operands.
        """
        task, stream = self._waiting, self._stream
        if task is None:
            return
        assert stream is not None
        # A wait on the device. The host goes on at once.
        stream.wait_event(task.ready)
        self._keep(task.tensors, stream)
        # An engine that frees operands one by one must hold the last reference.
        task.tensors.clear()
        repeatable = False
        try:
            # `current_stream` is the side stream inside the block, so the engine launches there.
            with torch.cuda.stream(stream):
                task.work.add_to(task.batch, task.pending)
        except MemoryError:
            repeatable = task.pending.dout is not None
            raise
        finally:
            if not repeatable:
                self._waiting = None
        self._on_stream = True

    def finish(self) -> None:
        """Order the caller's next launches behind the side stream. The host waits for nothing."""
        self.launch()
        if self._on_stream and self._stream is not None:
            # After this wait nothing on the caller's stream overtakes the side stream, so tensors
            # that were held for it may go.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._on_stream = False
            self._held.clear()

    def discard(self) -> None:
        """Drop what waits. The caller's next launches are ordered behind what already runs on the
        side stream.
        """
        # Cleared first, so that `finish` has nothing to compute and only orders the two streams.
        self._waiting = None
        self.finish()

    def _keep(self, tensors: list[Tensor], stream: Any) -> None:
        """Keep the tensors' memory from reuse until `stream` has read it."""
        for tensor in tensors:
            # PyTorch's allocator then hands no freed block out again before the side stream has
            # done its work. Paddle has no such call, so a reference keeps the memory until `finish`.
            if hasattr(tensor, "record_stream"):
                tensor.record_stream(stream)
            else:
                self._held.append(tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses and sequences: engines keep operands in their own forms."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, BlockScaledTensor):
        yield from value.parts
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
