"""What was found out about gradient memory, so that it need not be found out again where the memory
lies where it lay.

A trainer may replace any gradient tensor between two backwards, so each backward has to look. Checks
of 256 tensors take longer than a launch; this look takes about 0.25 us a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch

Tensor = torch.Tensor
# Called by `map`: a loop in Python takes three times as long as these calls themselves.
_ADDRESS: Callable[[Any], int] = torch.Tensor.data_ptr
_STRIDES: Callable[[Any], Any] = torch.Tensor.stride
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")

MAX_KNOWN = 1024  # gradients of so many layers that stay in place are known


# Answers about memory of one place, by question. They hold no memory.
Findings = dict[Hashable, Any]

# By addresses, strides, shapes and dtypes: memory that a framework makes anew, or of which a trainer
# makes new views, often lies where it lay at the last step.
_known: dict[Hashable, Findings] = {}


def findings_of(arrangement: Hashable, tensors: Sequence[Tensor | None]) -> Findings:
    """What is known of the memory of these tensors, of which some may be None. arrangement: what else
    decides where a gradient is added.
    """
    absent, present = tuple(map(is_, tensors, repeat(None))), _present(tensors)
    # Paddle's shapes and strides are lists. A device shows in the address.
    lies = *map(_ADDRESS, present), *map(tuple, map(_STRIDES, present))
    kinds = *map(tuple, map(_SHAPE, present)), *map(_DTYPE, present)
    key = arrangement, absent, lies, kinds
    if key not in _known and len(_known) >= MAX_KNOWN:
        _known.clear()
    return _known.setdefault(key, {})


class Footprint:
    """Where tensors lay when somebody looked, and what is known of their memory.

    It owns no tensor, so a trainer's memory is free when the trainer drops it.
    """

    def __init__(self, arrangement: Any, tensors: Sequence[Tensor | None]) -> None:
        """arrangement: as of `findings_of`."""
        present = _present(tensors)
        self._is_whole = len(present) == len(tensors)
        self.arrangement, self.findings = arrangement, findings_of(arrangement, tensors)
        self._places = list(map(_ADDRESS, present)), list(map(_STRIDES, present))
        # While a tensor lives nobody else has its id. When one of them dies, ids prove nothing.
        self._ids, alive = list(map(id, tensors)), [True]
        self._refs = [weakref.ref(tensor, lambda _: alive.clear()) for tensor in present]
        self._alive = alive

    def __reduce__(self) -> tuple[type[Footprint], tuple[None, tuple[()]]]:
        """The tensors of a copied layer lie elsewhere, so a copy knows none."""
        return Footprint, (None, ())

    def is_of(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these are the same living objects, whose memory lies where it lay.

        It compares addresses and strides, one of which changes in `t_`, `reshape_`, `set_`, or when
        storage is freed or replaced. Shapes and dtypes would take as long again. Of a living object
        they can change alone only by a `.data` that begins at the same address with equal strides, and
        has another dtype or fewer rows: no gradient of the same parameter.
        """
        if not self._alive or list(map(id, tensors)) != self._ids:
            return False
        present = tensors if self._is_whole else _present(tensors)
        return (list(map(_ADDRESS, present)), list(map(_STRIDES, present))) == self._places


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return list(compress(tensors, map(is_not, tensors, repeat(None))))  # type: ignore[arg-type]
