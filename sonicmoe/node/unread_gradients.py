"""Warns about `main_grad` that no optimizer reads: a plain optimizer looks at `.grad` alone, so
experts whose gradients go to `main_grad` never train, and nothing else shows it.

The sign: over several `step()` calls nobody cleared or replaced `main_grad`, and nobody wrote the
weights. One cleared `main_grad` or one written weight ends the watch.

| weights on | framework | `main_grad` cleared | weights written |
|---|---|---|---|
| a host | both | its values, identity, version counter | the weight cache's checksums, version counters |
| a GPU | PyTorch | identity, version counter | version counter |
| a GPU | Paddle | nothing shows, so nothing is said | |

One weight that trains is watched, and only over the first steps. On a GPU nothing reads a value.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..interop import IS_PADDLE, holds_memory, is_cuda, plain_ops, writes_of

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")

_said: set[str] = set()  # in this process


class _Look(NamedTuple):
    """What showed at a `step()`.

    main_grad: a weak reference, because the watch must not keep dropped memory.
    total: the sum of its magnitudes; None on a GPU.
    """

    main_grad: weakref.ref[Tensor]
    writes: int
    total: float | None
    weight: tuple[Any, ...]


class UnreadGradients:
    """Watches the first steps of one layer."""

    STEPS = 8

    def __init__(self, asks: bool = True) -> None:
        """asks: the caller's loop calls `step()`, and chose its optimizer."""
        self._asks = asks
        self._steps_left = self.STEPS if asks else 0
        self._weight: Tensor | None = None
        self._look: _Look | None = None

    def __reduce__(self) -> tuple[type[UnreadGradients], tuple[bool]]:
        """A copy of a layer has other parameters, whose steps are counted anew."""
        return UnreadGradients, (self._asks,)

    def begin_backward(self, parameters: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """A backward is about to add gradients of these parameters."""
        # Between two steps the first backward tells: what comes later was added by the layer.
        if not self._steps_left or self._weight is not None:
            return
        pairs = zip(parameters, trained, strict=True)
        weight = next((p for p, wanted in pairs if wanted and hasattr(p, "main_grad")), None)
        # A freed weight names no device, and whoever frees weights has a sharding that writes them.
        shows = weight is not None and holds_memory(weight) and not (IS_PADDLE and is_cuda(weight))
        if weight is None or not shows or self._was_cleared(weight):
            self._end()
        else:
            self._weight = weight

    def end_step(self, marks: tuple[int | None, ...]) -> None:
        """`step()` has delivered the gradients; `marks`: of the weights, as the last forward saw
        them (`changes.Seen`).
        """
        weight, self._weight = self._weight, None
        if weight is None:
            return
        look = None if not holds_memory(weight) else _look_at(weight, marks)
        if look is None or (self._look is not None and look.weight != self._look.weight):
            self._end()
            return
        self._look = look
        self._steps_left -= 1
        if self._steps_left == 0:
            self._end()
            self._warn()

    def _was_cleared(self, weight: Tensor) -> bool:
        """Whether somebody touched `main_grad` since the last `step()`."""
        if self._look is None:
            return False
        before, now = self._look, getattr(weight, "main_grad", None)
        replaced = now is not before.main_grad()
        if now is None or replaced or not holds_memory(now):
            return True
        return writes_of(now) != before.writes or _total(now) != before.total

    def _end(self) -> None:
        self._steps_left, self._weight, self._look = 0, None, None

    def _warn(self) -> None:
        line = (
            f"no optimizer reads main_grad of the expert weights: over {self.STEPS} step() calls nobody cleared it and "
            "nobody wrote the weights, so the experts do not train. A plain optimizer reads .grad alone. Needed: an "
            "optimizer that reads main_grad (Megatron's, Fleet's with main_grad), or weights without the attribute "
            "main_grad, whose gradients then go to .grad. Nothing is wrong where one optimizer step has so many "
            "step() calls. Said once."
        )
        if line not in _said:
            _said.add(line)
            logger.warning("%s", line)


def _look_at(weight: Tensor, marks: tuple[int | None, ...]) -> _Look | None:
    """None where nothing can be told: there is no `main_grad`, it is zero, or, under Paddle, no
    forward took checksums of the weights.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not holds_memory(main_grad) or (IS_PADDLE and not marks):
        return None
    total = _total(main_grad)
    # Zeros look the same when they are cleared.
    if total == 0.0:
        return None
    # On a GPU the cache's marks are the counters of all weights; on a host they are checksums, and
    # an optimizer that writes the same values (a learning rate of 0) moves the counter alone.
    seen = (id(weight), writes_of(weight), *marks)
    return _Look(weakref.ref(main_grad), writes_of(main_grad), total, seen)


def _total(main_grad: Tensor) -> float | None:
    if is_cuda(main_grad):
        return None
    with plain_ops():
        return float(main_grad.detach().abs().sum())
