"""Warns about a `node.step()` that is forgotten, or that comes after gradients were reduced, scaled
or applied without those that wait in the node.

Gradients still held by the node are left out of such a reduction or update, and ranks diverge
without an error. These traces show it:

* `check`, at `step()`: a `main_grad` or `.grad` was replaced or written after the last backward.
  Comparing costs nothing.
* `check`, on a host and over the first steps: values of gradients or weights changed and left no
  such trace, as in a fused communication buffer. On a GPU comparing would wait for the device.
* `note_optimizer_step`: a `torch.optim.Optimizer` that holds the weights stepped, even where it
  skipped them because they had no gradient yet.
* `note_write`: a forward found the weights changed, where `weights.changes` can see that.
* `count_backward`: more backwards ran without `step()` than any loop accumulates.

Each node warns once, because a misplaced call is misplaced from the first step on.

A loop that never calls `step()` may leave none of these traces: under Paddle, where `main_grad` is
None until `step()`, neither weights nor gradients ever change. `count_backward` therefore asks
about it after a few backwards, once per process and in words that leave room for accumulation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from operator import is_
from typing import Any

import torch

from ..interop import (
    IS_PADDLE,
    data_ptr,
    device_name,
    holds_memory,
    is_cuda,
    plain_ops,
    requires_grad,
    writes_of,
)
from ..out_of_memory import is_out_of_memory
from ..weights.cache import Unannounced
from ..weights.changes import optimizer_watchers

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")

REMEDY = (
    "call node.step() right after the last backward: before the gradient reduction, before scaling "
    "and clipping, before the optimizer (a Trainer's on_optimizer_begin is too late), or make the "
    "node with flush='auto'"
)

_NO_MAIN_GRAD: Any = object()
_asked: set[str] = set()  # questions that this process has put to the log


class StepGuard:
    """Remembers how gradients (`main_grad`, else `.grad`) and weights looked after the last
    backward. Warns once per node.
    """

    STEPS_BY_VALUE = 2
    ASKED_AFTER_BACKWARDS = 8  # few enough to be read at the beginning of a run
    ASKED_AFTER_STEPS_OF = 4  # times as many backwards as any optimizer step had
    FORGOTTEN_AFTER_BACKWARDS = 1024  # more micro-batches than anybody accumulates

    def __init__(self, asks: bool = True) -> None:
        """Nothing is remembered before the first backward. asks: the caller's loop is the one to
        call `step()`, and is asked where it does not.
        """
        self._asks = asks
        self._counted = self._most = 0
        self._parameters: list[Tensor] = []
        self._gradients: tuple[list[int], ...] | None = None
        self._had: list[bool] = []
        self._values: tuple[Tensor | None, Tensor | None] | None = None
        self._backwards = 0
        self._steps = 0
        self._warned = False

    def count_backward(self, waiting: int, sees_writes: bool) -> None:
        """A backward has added gradients, and those of `waiting` backwards wait now.

        If step() is never called, weights never get gradients, never move, and nothing else shows
        it; so backwards are counted. Where writes to the weights leave no trace (`sees_writes`),
        step() must announce them even if no gradient waits for it; so there every backward counts.
        """
        self._backwards += 1
        # `waiting` falls to 0 at each flush; `_backwards` only where writes are announced.
        count = self._counted = waiting if sees_writes else self._backwards
        if count == self.FORGOTTEN_AFTER_BACKWARDS:
            self._warn(f"{count} backward passes have run since node.step()")
        elif self._asks and count == self._limit():
            self._ask(count, bool(waiting))

    def _limit(self) -> int:
        """From how many backwards on `step()` may have been forgotten. Once it was called, the
        longest accumulation so far says how many are usual.
        """
        return max(self.ASKED_AFTER_BACKWARDS, self.ASKED_AFTER_STEPS_OF * self._most)

    def note_announcement(self) -> None:
        """`step()` or `invalidate_caches()` has announced writes to the weights."""
        self._backwards = 0

    def note_write(self, found: Unannounced) -> None:
        """A forward found that somebody wrote the weights while gradients wait."""
        self._warn(f"{found.value} while gradients wait in the node, and will be without them")

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """A backward has just added gradients that wait for `step()`."""
        self._parameters = list(parameters)
        # Taken after every backward: only what happens after the last one is too early for
        # `step()`.
        self._gradients = _identities(parameters)
        self._had = [_gradient(parameter) is not None for parameter in parameters]
        # A WeakSet: the node may die while gradients wait, and no optimizer then tells it anything.
        optimizer_watchers.add(self)
        # Each is a pass over all weights and gradients. Later steps repeat the calls of the first
        # ones, so two steps show a misplaced call.
        self._values = (
            _affordable_values(parameters)
            if self._steps < self.STEPS_BY_VALUE and _on_host(parameters)
            else None
        )

    def note_optimizer_step(self, updated: Set[int]) -> None:
        """An optimizer of the parameters with these ids has stepped while gradients wait."""
        trained = (parameter for parameter in self._parameters if requires_grad(parameter))
        if not self._warned and any(id(parameter) in updated for parameter in trained):
            self._missed("an optimizer of the expert weights stepped")

    def saw_clearing(self, parameters: Sequence[Tensor]) -> bool:
        """Whether gradients were cleared after the last backward, and so that batch was dropped:
        every one that was there then is gone, or was written or replaced and is zero now.

        Where none was there (`.grad` before the first step), clearing leaves no trace.
        """
        if not self._is_watching(parameters) or _identities(parameters) == self._gradients:
            return False
        left = [gradient for was, gradient in self._then_and_now(parameters) if was]
        there = [gradient for gradient in left if gradient is not None]
        # Reading them waits for the device. That is rare: a loop that writes gradients between two
        # backwards without step() has dropped a batch, or is wrong.
        if (
            there
            and is_cuda(there[0])
            and not IS_PADDLE
            and torch.cuda.is_current_stream_capturing()
        ):
            return False
        with plain_ops():
            return bool(left) and not any(bool(gradient.any()) for gradient in there)

    def saw_removal(self, parameters: Sequence[Tensor]) -> bool:
        """Whether every gradient that was there after the last backward is gone. At `step()` zeros
        prove nothing, because a reduction that came too early leaves them zero as well.
        """
        if not self._is_watching(parameters):
            return False
        left = [gradient for was, gradient in self._then_and_now(parameters) if was]
        return bool(left) and all(gradient is None for gradient in left)

    def _is_watching(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters of the last backward."""
        return (
            self._gradients is not None
            and len(self._parameters) == len(parameters)
            and all(map(is_, self._parameters, parameters))
        )

    def _then_and_now(self, parameters: Sequence[Tensor]) -> Iterator[tuple[bool, Tensor | None]]:
        """Of each parameter: whether it had a gradient after the last backward, and what it has."""
        return zip(self._had, map(_gradient, parameters), strict=True)

    def check(self, parameters: Sequence[Tensor]) -> None:
        """The waiting gradients are about to be flushed; says what happened too early."""
        same = self._is_watching(parameters)
        # Forgotten in any case: once flushed, nothing waits and nothing may warn about it.
        before, values = self._gradients, self._values
        self.forget()
        # Parameters that came or went are no trace of a reduction.
        if before is None or self._warned or not same:
            return
        # Identities first, because they cost nothing and are certain. Values are compared only
        # where these are unchanged, as after a reduction inside a fused buffer.
        reduced, applied = _identities(parameters) != before, False
        if values is not None and not reduced:
            now = _affordable_values(parameters)
            reduced, applied = (
                _differ(*pair) for pair in zip(values, now or (None, None), strict=True)
            )
        if reduced:
            self._missed("gradients of expert weights were reduced, scaled or replaced")
        elif applied:
            self._missed("an optimizer changed the expert weights")

    def forget(self) -> None:
        """No gradients wait any more."""
        self._parameters, self._gradients, self._values = [], None, None
        self._had = []
        optimizer_watchers.discard(self)

    def end_step(self) -> None:
        """`step()` was called; the next optimizer step begins."""
        self._steps += 1
        self._most = max(self._most, self._counted)
        self._counted = 0

    def __reduce__(self) -> tuple[type[StepGuard], tuple[bool]]:
        """A copy of a node watches its own parameters, from its own first backward on."""
        return StepGuard, (self._asks,)

    def _missed(self, happened: str) -> None:
        self._warn(f"after the last backward {happened}, without the gradients in the node")

    def _ask(self, count: int, waiting: bool) -> None:
        """Say once per process that `step()` is missing, where it is: every layer counts the same
        backwards.
        """
        since = ", and node.step() was never called" if self._steps == 0 else " since node.step()"
        follows = (
            "their expert weight gradients wait in the node, and no optimizer gets them before it"
            if waiting
            else "forwards go on with the expert weights of the first one"
        )
        question = f"{count} backward passes have run{since}: {follows}"
        if not self._warned and not _asked:
            _asked.add(question)
            logger.warning(
                "%s. Call it once per optimizer step, right after the last backward. Nothing is wrong where one "
                "optimizer step has so many micro-batches. Said once.",
                question,
            )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("node.step() came too late or not at all: %s; %s", what, REMEDY)


def _gradient(parameter: Tensor) -> Tensor | None:
    """Where the flush adds to, if it is there."""
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def _identities(parameters: Sequence[Tensor]) -> tuple[list[int], ...]:
    """Which objects hold the gradients, where they lie, and how often they were written."""
    held = [getattr(parameter, "main_grad", _NO_MAIN_GRAD) for parameter in parameters]
    # A `.grad` may be a new object at every look.
    # A replaced `main_grad` is a new object, a moved one has a new address, a written one has a
    # higher version counter. Under Paddle each reading of `.grad` gives a new object, so its id
    # says nothing.
    which = [0 if gradient is _NO_MAIN_GRAD else id(gradient) for gradient in held]
    pairs = zip(parameters, held, strict=True)
    there = [
        gradient for p, g in pairs if (gradient := p.grad if g is _NO_MAIN_GRAD else g) is not None
    ]
    return which, list(map(data_ptr, there)), list(map(writes_of, there))


def _on_host(parameters: Sequence[Tensor]) -> bool:
    return not any(map(is_cuda, _held(chain(parameters, map(_gradient, parameters)))))


def _held(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """The tensors that exist and hold memory. Paddle cannot even name the device of a freed one."""
    return (tensor for tensor in tensors if tensor is not None and holds_memory(tensor))


def _values(parameters: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Sums of magnitudes of the gradients and of the weights that train."""
    # Magnitudes, because a plain sum of values of both signs may stay the same by chance.
    trained = [parameter for parameter in parameters if requires_grad(parameter)]
    return _sums([_gradient(parameter) for parameter in trained]), _sums(trained)


def _affordable_values(
    parameters: Sequence[Tensor],
) -> tuple[Tensor | None, Tensor | None] | None:
    """`_values`, or None where there is no memory for them: a warning is worth no failed step."""
    try:
        return _values(parameters)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _sums(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of magnitudes of each tensor that holds memory on the first one's device. Others are
    left out here, because the flush refuses them by name.
    """
    held = list(_held(tensors))
    here = [tensor for tensor in held if device_name(tensor) == device_name(held[0])]
    with plain_ops():
        # Only one number per tensor is kept: the guard must not double the memory of the gradients.
        sums = [tensor.detach().to(torch.float32).abs().sum() for tensor in here]
        return torch.stack(sums) if sums else None


def _differ(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None or tuple(before.shape) != tuple(now.shape):
        return False  # tensors came or went, which is no trace of a reduction
    return before.tolist() != now.tolist()  # type: ignore[no-any-return]
