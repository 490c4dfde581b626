"""Whether gradient memory lies where it lay at the last look, so that what was found out about it then
need not be found out again.

A trainer may replace any gradient tensor between two backwards, so each backward has to look. Checks
of 256 tensors take longer than a launch; this look takes about 0.25 us a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch

Tensor = torch.Tensor
Value = TypeVar("Value")
# Called by `map`: a loop in Python takes three times as long as these calls themselves.
_ADDRESS: Callable[[Any], int] = torch.Tensor.data_ptr
_STRIDES: Callable[[Any], Any] = torch.Tensor.stride
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class Footprint:
    """Addresses, strides, shapes and dtypes of tensors, and what was found out about their memory.

    It owns no tensor, so a trainer's memory is free when the trainer drops it.
    """

    def __init__(
        self,
        arrangement: Hashable,
        tensors: Sequence[Tensor | None],
        findings: dict[Hashable, Any] | None = None,
    ) -> None:
        """Of tensors, of which some may be None, in an arrangement: what else decides where a
        gradient is added. findings: those of the same memory, seen through other tensors.
        """
        present = _present(tensors)
        self._arrangement, self._frozen = arrangement, _frozen(tensors)
        self._places = list(map(_ADDRESS, present)), list(map(_STRIDES, present))
        self._kinds = list(map(_SHAPE, present)), list(map(_DTYPE, present))
        self._findings = {} if findings is None else findings
        # While a tensor lives nobody else has its id. When one of them dies, ids prove nothing.
        self._ids, alive = list(map(id, tensors)), [True]
        self._refs = [weakref.ref(tensor, lambda _: alive.clear()) for tensor in present]
        self._alive = alive

    def __reduce__(self) -> tuple[type[Footprint], tuple[None, tuple[()]]]:
        """Of a copy: none, because the tensors of a copied layer lie elsewhere."""
        return Footprint, (None, ())

    def seen_again(
        self, arrangement: Hashable, tensors: Sequence[Tensor | None]
    ) -> Footprint | None:
        """The footprint of these tensors with what is known of this one, where the memory is the
        same in the same order; else None.

        Of the same tensor objects it compares addresses and strides, one of which changes in `t_`,
        `reshape_`, `set_`, or when storage is freed or replaced. Shapes and dtypes would take as
        long again. Of a living object they can change alone only by a `.data` that begins at the
        same address with equal strides, and has another dtype or fewer rows: no gradient of the
        same parameter. Of other objects it compares shapes and dtypes too. A device shows in the
        address.
        """
        same_objects = bool(self._alive) and list(map(id, tensors)) == self._ids
        matches = same_objects or _frozen(tensors) == self._frozen
        if arrangement != self._arrangement or not matches:
            return None
        present = _present(tensors)
        if (list(map(_ADDRESS, present)), list(map(_STRIDES, present))) != self._places:
            return None
        if same_objects:
            return self
        if (list(map(_SHAPE, present)), list(map(_DTYPE, present))) != self._kinds:
            return None
        return Footprint(arrangement, tensors, self._findings)

    def once(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """What `find` returns; of the same memory and key it is called once."""
        if key not in self._findings:
            self._findings[key] = find()
        return self._findings[key]  # type: ignore[no-any-return]


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _frozen(tensors: Sequence[Tensor | None]) -> list[bool]:
    return list(map(is_, tensors, repeat(None)))
