"""`GradientSink`: the weight gradients of one layer, from the backward that computes them to the
parameters that they are for. Every face uses this one type: a node keeps one, and the functional
API (`MoE`, transformers models) makes one for each backward, whose gradients all go to autograd.

    batch = sink.open(...) ──► sink.add(engine, pending, batch) ──► sink.close(batch) ──► autograd
                                                                       ... flush() ──► main_grad, .grad

With "auto" (alias "backward") a backward leaves its gradients complete:

* straight in `main_grad`, where all parameters that train have that attribute and the engine can
  add there;
* through a native buffer that `close` flushes, where the engine cannot;
* where a parameter has no `main_grad`, autograd gets its gradient, from fresh memory that the
  engine wrote or from a native buffer; those with `main_grad` get theirs there.

With "step" they wait in a native buffer of the sink until `flush()`.

A native buffer of "auto" lives for one backward. So nothing waits there, and a backward that fails
in one has left nothing. A backward that fails between its additions to `main_grad`, or to the
buffer of "step", leaves incomplete sums: then every flush refuses until `discard`. Running out of
memory loses nothing, because engines take theirs before the first addition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress, repeat
from operator import attrgetter, is_
from threading import RLock
from typing import Any

import torch

from ..engine.footprint import Footprint
from ..engine.interface import Engine, EngineSettings, GradientTargets, PendingWgrad
from ..engine.settings import GradientMode
from ..enums import FlushMode
from ..interop import device_name, is_capturing, plain_ops
from ..log import log_once
from ..stream_order import StreamOrder
from ..weights.parameters import ExpertParameters
from .batch import (
    ABSENT,
    GradientBatch,
    are_writable,
    fresh_targets,
    has_main_grad,
    main_grads_of,
    memory_for_none,
    refuse_results,
    stand_ins_for,
)
from .flush import check_main_grads, flush_native
from .overwriting import Overwriting
from .waiting import CapturedMemory, Waiting, into_parameters, own_writes

Tensor = torch.Tensor


class GradientSink:
    """Gives each backward memory for its weight gradients, orders the streams that add to it, and
    keeps what waits.
    """

    def __init__(self, layer: ExpertParameters, way: FlushMode = FlushMode.AUTO) -> None:
        self._layer = layer
        self.way = way
        self._buffer: GradientTargets | None = None
        self._waiting: Waiting | None = None
        self._order = StreamOrder()  # of additions to the buffer, and of flushes
        self._direct: StreamOrder | None = None
        self._captured = CapturedMemory()
        self.overwriting = Overwriting(way, layer.name_of)
        # Where the last backward of these weights added directly, by what it trained: its guard, and
        # the memory.
        self._bound: dict[tuple[bool, ...], tuple[tuple[Any, ...], Footprint | None]] = {}
        self._incomplete = ""

    def __reduce__(self) -> tuple[type[GradientSink], tuple[ExpertParameters, FlushMode]]:
        """A copy has no backward behind it: what waits here is for these parameters."""
        return GradientSink, (self._layer, self.way)

    @property
    def waiting(self) -> int:
        """How many backwards have added gradients that no flush has taken."""
        return 0 if self._waiting is None else self._waiting.count

    @property
    def nbytes(self) -> int:
        """Bytes held now; 0 before the first backward that waits, and after `release`."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def held(self) -> dict[str, Tensor]:
        """The memory that gradients wait in, by the name of the gradient, for those who inspect it;
        empty before the first backward.
        """
        return {} if self._buffer is None else self._buffer.named()

    def alone(self, like: Tensor) -> AbstractContextManager[Any]:
        """While inside, no other thread adds weight gradients on the device of `like`."""
        device = device_name(like)
        # `setdefault` and not `cache`, which may call twice where two threads ask at once.
        return _LOCKS.get(device) or _LOCKS.setdefault(device, RLock())

    def open(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor],
        trained: list[bool],
        dout: Tensor,
    ) -> GradientBatch:
        """Decide where a backward that begins now adds its gradients, and take the memory.

        Args:
            parameters: the layer's, as the forward found them. Of those without `main_grad` only
                shape, dtype and `is_leaf` are read.
            trained: which of them want a gradient.
            dout: the gradient of the output, on whose device gradients are computed.
        """
        if not all(map(_IS_LEAF, parameters)):
            refuse_results(self._layer, parameters, trained, self.way is FlushMode.STEP)
        if not self._layer.keeps_its_layout:  # since the forward; the gradient follows its weight
            self._layer.parameters()
        if self.way is FlushMode.STEP:
            return self._open_waiting(parameters, trained, dout)
        main_grads = main_grads_of(parameters, trained)
        written = self.overwriting.written_by(parameters, trained, main_grads)
        batch = None
        if not any(map(is_, main_grads, repeat(ABSENT))):
            batch = self._direct_batch(engine, settings, parameters, trained, main_grads, dout)
        else:
            log_once(logging.INFO, _THROUGH_AUTOGRAD)
            only_autograd = all(map(is_, compress(main_grads, trained), repeat(ABSENT)))
            writes = only_autograd and engine.writes_gradients(settings, device_name(dout))
            if writes and are_writable(parameters, trained):
                targets = fresh_targets(self._layer, parameters, trained, dout)
                batch = GradientBatch(parameters, trained, targets)
        if batch is None:
            # The engine cannot write where the gradients go. This memory lives for one backward.
            batch = GradientBatch(parameters, trained, self._native_zeros(dout))
        batch.written = written
        if is_capturing(dout):
            self.overwriting.refuse_capture()
            self._captured.keep(parameters, trained)
        # Asked at every backward of parameters that nearly never have it.
        if any(map(hasattr, parameters, repeat("grad_added_to_main_grad"))):
            batch.stand_ins = stand_ins_for(parameters, trained)
        return batch

    def check_collectable(self, parameters: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Refuse to give gradients to a caller who wants none accumulated, where they would be
        added to `main_grad` or wait for `step()`.
        """
        if self.way is FlushMode.STEP or any(map(has_main_grad, compress(parameters, trained))):
            raise RuntimeError(
                "torch.autograd.grad or paddle.grad was asked for the gradient of an expert weight, "
                "and this node adds it to main_grad or keeps it for step(); nothing was added; "
                "needed: backward(), or weights without main_grad and flush='auto'"
            )

    def add(self, engine: Engine, pending: PendingWgrad, batch: GradientBatch) -> None:
        """Have the engine add the gradients of one backward, on the current stream; the caller is
        `alone`.

        Where it raises between its additions, the sums stay incomplete, because nobody can take
        back what was added.
        """
        targets = batch.targets
        anchor = targets.anchor
        # Two backwards may run on two streams and add into the same memory. Each waits, on the
        # device, for the additions launched before it. Memory of this backward alone needs none
        # of that.
        order = self._order if batch.waits else None
        writes = _NO_WRITES
        if batch.is_direct:
            order = self._direct = into_parameters(device_name(anchor))
            writes = own_writes(batch.parameters)
        if order is not None:
            order.enter(anchor)
        try:
            with writes:
                if batch.is_direct and batch.written:
                    batch.prepare(engine, pending)
                engine.backward_dw(pending, targets)
                if batch.fresh:
                    batch.bind()
        except BaseException:
            # Memory of this backward alone is dropped with it.
            if targets.adding and (batch.is_direct or batch.waits):
                self._give_up(batch.is_direct)
            targets.adding = False
            raise
        finally:
            if order is not None:
                order.leave()

    def _give_up(self, is_direct: bool) -> None:
        """Gradients of a backward are lost; from now on every flush refuses, until `discard`."""
        self._incomplete = _PARTLY_IN_MAIN_GRAD if is_direct else _PARTLY_HERE

    def close(self, batch: GradientBatch) -> list[Tensor | None]:
        """A backward has added its gradients. Returns those that autograd is to accumulate, one
        entry per parameter.
        """
        returned: list[Tensor | None] = [None] * len(batch.trained)
        # Counted here and not when the memory was opened: a backward may fail in between.
        if batch.waits:
            assert self._waiting is not None
            self._waiting.count += 1
        elif batch.targets.mode is GradientMode.NATIVE:
            given = self._layer, batch.parameters, batch.trained, batch.targets
            over = batch.written_memory if batch.written else ()
            returned = flush_native(*given, through_autograd=True, over=over)
        elif not batch.is_direct:
            returned = batch.targets.of_parameters(len(returned))
        if batch.written:
            self.overwriting.done(batch)
        for index, zeros in batch.stand_ins.items():
            batch.parameters[index].grad_added_to_main_grad = True  # type: ignore[attr-defined]
            returned[index] = zeros
        return returned

    def flush(self) -> None:
        """Add what waits into `main_grad` (or `.grad`) of every parameter that it is for, and have
        the current stream wait for all additions. Where it raises, nothing was flushed.
        """
        # Additions straight into main_grad may run on another stream than the one that is about to
        # reduce it.
        if self._direct is not None:
            self._direct.join()
        self._captured.check()
        # A backward that failed is not counted as waiting, but a part of its gradients was added.
        if self._incomplete:
            raise RuntimeError(self._incomplete)
        if not self.waiting:
            return
        waiting, native = self._waiting, self._buffer
        assert waiting is not None and native is not None
        with self.alone(native.anchor):
            self._check_held(waiting.parameters)
            waiting.check(self._layer.name_of)
            self._order.enter(native.anchor)
            try:
                given = self._layer, waiting.parameters, waiting.trained, native
                flush_native(*given, through_autograd=False)
            finally:
                self._order.leave()
            # Last: after a launch that failed the gradients still wait, and the flush may be
            # repeated.
            self._waiting = None

    def discard(self) -> None:
        """Drop what waits: its gradients are not wanted. What is in `main_grad` already stays."""
        if self._buffer is not None:
            self._order.enter(self._buffer.anchor)
            with plain_ops():
                for tensor in self._buffer.tensors():
                    tensor.zero_()
            self._order.leave()
        self._waiting, self._incomplete = None, ""
        self.overwriting.discard()

    def end_step(self) -> None:
        """`step()` came, and the next backward is the first. Gradients that were to be written, and
        that no backward wrote, are zeros from here on, so that last step's never train.
        """
        unwritten = self.overwriting.end_step()
        if not unwritten:
            return
        with self.alone(unwritten[0]), plain_ops():
            order = into_parameters(device_name(unwritten[0]))
            order.enter(unwritten[0])
            for memory in unwritten:
                memory.zero_()
            order.leave()

    def release(self) -> None:
        """Free the memory until the next backward, and forget captured memory; raises where
        gradients wait that were not flushed.
        """
        if self.waiting or self._incomplete:
            raise RuntimeError(
                "accumulators hold gradients that were never flushed; call step() or "
                "discard_grads() first"
            )
        self._buffer = None
        # Graphs go on adding to that memory; the caller says that none is replayed any more.
        self._captured = CapturedMemory()

    def _open_waiting(
        self, parameters: Sequence[Tensor], trained: list[bool], dout: Tensor
    ) -> GradientBatch:
        """Into the buffer. Gradients that wait there for other parameters, or for others of these, are
        handed over first: each set is for the parameters that its backward was for.
        """
        self.overwriting.refuse_flags(parameters, trained)
        waiting = self._waiting if self.waiting else None
        if waiting is not None and not waiting.is_for(parameters, trained):
            self.flush()
            waiting = None
        if waiting is not None:
            waiting.check(self._layer.name_of)
            waiting.take_new_places()
        else:
            # Refused before anything waits for memory that nothing could be added to.
            check_main_grads(self._layer, parameters, trained, dout)
            self._waiting = Waiting(parameters, trained)
        if self._buffer is None:
            self._buffer = self._native_zeros(dout)
        return GradientBatch(parameters, trained, self._buffer, waits=True)

    def _direct_batch(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor],
        trained: list[bool],
        main_grads: list[Any],
        dout: Tensor,
    ) -> GradientBatch | None:
        """Straight into `main_grads`; None where the engine cannot add there."""
        fresh: dict[int, Tensor] = {}
        if any(map(is_, main_grads, repeat(None))):
            about = self._layer, parameters, trained, main_grads
            fresh = memory_for_none(*about, dout.device)
        # Where there are two parameters one may be added to without the other, so each case is known by
        # itself. Many parameters are looked at as one. Weights may change their layout beside
        # gradients that stay, and a trainer may replace any of these, so every backward looks.
        which = tuple(trained) if len(trained) == 2 else ()
        guard = engine, settings, device_name(dout), self._layer.layout
        bound, before = self._bound.get(which, ((), None))
        if before is not None and bound == guard and before.is_of(main_grads):
            targets = GradientTargets.at(before, main_grads)
            return GradientBatch(parameters, trained, targets, is_direct=True, fresh=fresh)
        targets = self._layer.targets(main_grads)
        footprint = targets.footprint()
        # New views of the same memory, or memory that was made anew there, fit as before.
        if before is None or bound != guard or footprint.findings is not before.findings:
            self._bound.pop(which, None)
            # Raises where nothing could be added there.
            check_main_grads(self._layer, parameters, trained, dout)
            problem = engine.problem_of(targets, settings, self._layer.layout)
            if problem is not None:
                log_once(logging.INFO, f"{_THROUGH_AUTOGRAD}: {problem}")
                return None
            log_once(logging.INFO, "expert weight gradients are added straight into main_grad")
        self._bound[which] = guard, footprint
        return GradientBatch(parameters, trained, targets, is_direct=True, fresh=fresh)

    def _native_zeros(self, dout: Tensor) -> GradientTargets:
        (experts, n1, hidden), (_, _, inner) = self._layer.native_shapes
        bias = self._layer.has_biases
        return GradientTargets.zeros(experts, n1, hidden, inner, bias, dout.device)

    def _check_held(self, owners: Sequence[Tensor]) -> None:
        """Raise where gradients wait for parameters that nobody will look at any more."""
        # Adding to a tensor that left the model would look like success.
        held = set(map(id, self._layer.parameters()))
        gone = sum(id(parameter) not in held for parameter in owners)
        if gone:
            raise RuntimeError(
                f"weight gradients wait for {gone} expert parameters that the modules held in the "
                "forward and hold no longer (replaced, or resharded as FSDP2 does); needed: step() "
                "before that, a node with flush='auto', or discard_grads()"
            )


_NO_WRITES: AbstractContextManager[None] = nullcontext()
_IS_LEAF: Callable[[Tensor], bool] = attrgetter("is_leaf")
_LOCKS: dict[str, AbstractContextManager[Any]] = {}
_THROUGH_AUTOGRAD = (
    "expert weight gradients are handed over by every backward, through autograd where there is no "
    "main_grad"
)

_PARTLY_HERE = (
    "a backward failed while it added weight gradients, and left a part of them in the node; call "
    "node.discard_grads(), which drops those of every backward since the last step(), and run the "
    "step again or skip it"
)
_PARTLY_IN_MAIN_GRAD = (
    "a backward failed while it added weight gradients, and left a part of them in main_grad; zero "
    "main_grad (the optimizer's clear_grad or zero_grad), call node.discard_grads(), and run the "
    "step again or skip it"
)
