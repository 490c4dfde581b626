"""The memory of parameters that gradients go to, over time: in which order our own additions to it
run, whether somebody else touched it while gradients wait, and where a CUDA graph adds.

**While gradients wait** for `step()` their memory stays where it was at the first waiting backward,
or the next backward and `step()` raise: whoever replaced or cleared it may have reduced it, applied
it, or skipped the batch, and no trace tells which. New views of one memory are the same memory.
None is no place, so memory that is made in place of None is taken as found. A `main_grad` that owns
its whole storage must also keep its version. Views of a larger buffer share one counter with their
neighbours, and autograd adds to `.grad` by itself, so there the version says nothing.

Our own writes are known as ours (`own_writes`): several nodes may have one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from operator import is_
from typing import NamedTuple
from weakref import WeakSet

import torch

from ..interop import data_ptr, owns_storage, writes_of
from ..stream_order import StreamOrder

Tensor = torch.Tensor


@cache
def into_parameters(device: str) -> StreamOrder:
    """The order of all additions into memory of parameters on a device. It is one for the whole
    process, because several nodes may have one parameter (experts shared by two layers).
    """
    return StreamOrder()


class _MemoryState(NamedTuple):
    """`writes`: how often the memory was written; None where that says nothing."""

    address: int
    writes: int | None


class Waiting:
    """The backwards whose gradients wait in one node, and the places that these will go to.

    parameters: the layer's, as the forward of the first such backward found them.
    trained: which of them the gradients are for.
    count: of backwards.
    """

    def __init__(self, parameters: Sequence[Tensor], trained: list[bool]) -> None:
        self.parameters, self.trained, self.count = parameters, trained, 0
        self._places = {
            index: _place_of(parameter)
            for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True))
            if wanted
        }
        # Weakly: a node that is dropped takes its gradients with it.
        _all_waiting.add(self)

    def is_for(self, parameters: Sequence[Tensor], trained: list[bool]) -> bool:
        """Whether gradients wait for exactly those of these parameters that `trained` marks."""
        return self.trained == trained and all(map(is_, self.parameters, parameters))

    def check(self, name_of: Callable[[int], str]) -> None:
        """Raise a RuntimeError that names the parameter whose gradient's memory is another by now,
        or was written by somebody else.
        """
        for index in self._places:
            happened = self._touched(index)
            if happened:
                raise RuntimeError(
                    f"{name_of(index)}.{happened} while gradients of {self.count} backward(s) wait "
                    "in the node for step(); needed: node.step() before anybody replaces, clears, "
                    "scales or reduces it; node.discard_grads() to skip what waits; or "
                    "flush='auto', under which nothing waits"
                )

    def take_new_places(self) -> None:
        """Another backward is about to wait: memory that was made in place of None is its place."""
        self.look_again([index for index, place in self._places.items() if place is None])

    def _touched(self, index: int) -> str:
        """What somebody did to the memory of one gradient; empty if nothing."""
        parameter, then = self.parameters[index], self._places[index]
        # There was none, so whatever came since is nobody's loss.
        if then is None:
            return ""
        attribute = "main_grad" if hasattr(parameter, "main_grad") else "grad"
        held = getattr(parameter, attribute)
        if held is None or data_ptr(held) != then.address:
            return f"{attribute} lies elsewhere than at the first of them"
        moved = then.writes is not None and writes_of(held) != then.writes
        return f"{attribute} was written" if moved else ""

    def untouched_among(self, written: set[int]) -> list[int]:
        """Places of parameters with these ids that nobody else has touched so far."""
        return [
            index
            for index in self._places
            if id(self.parameters[index]) in written and not self._touched(index)
        ]

    def look_again(self, indices: Sequence[int]) -> None:
        """At places that we have written ourselves."""
        for index in indices:
            self._places[index] = _place_of(self.parameters[index])


_all_waiting: WeakSet[Waiting] = WeakSet()
_NOTHING = nullcontext()


def _place_of(parameter: Tensor) -> _MemoryState | None:
    # Autograd adds to `.grad` by itself, so its version says nothing.
    if not hasattr(parameter, "main_grad"):
        return None if parameter.grad is None else _MemoryState(data_ptr(parameter.grad), None)
    held = parameter.main_grad
    if held is None:
        return None
    # A view shares its counter with every other view of the buffer.
    return _MemoryState(data_ptr(held), writes_of(held) if owns_storage(held) else None)


def own_writes(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """While inside, we add to memory of these parameters, or give them some."""
    # Every direct backward asks, and nearly always nothing waits in this process.
    return _own_writes(parameters) if _all_waiting else _NOTHING


@contextmanager
def _own_writes(parameters: Sequence[Tensor]) -> Iterator[None]:
    written = set(map(id, parameters))
    # The list holds them alive.
    watching = [(each, each.untouched_among(written)) for each in list(_all_waiting)]
    try:
        yield
    finally:
        for each, places in watching:
            each.look_again(places)


class CapturedMemory:
    """The memory that backwards captured into CUDA graphs add to.

    Every replay adds there, whatever has become of the parameters. So the memory is kept alive, and
    `check` raises where a parameter has another `main_grad` by now.
    """

    def __init__(self) -> None:
        # Parameter, memory, and whether the backward writes there.
        self._held: dict[int, tuple[Tensor, Tensor, bool]] = {}

    def __reduce__(self) -> tuple[type[CapturedMemory], tuple[()]]:
        """No graph adds to a copy's parameters."""
        return CapturedMemory, ()

    def keep(self, parameters: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """A backward that adds to the `main_grad` of these is being captured; none may be None."""
        for parameter, wanted in zip(parameters, trained, strict=True):
            if wanted and hasattr(parameter, "main_grad"):
                if parameter.main_grad is None:
                    raise RuntimeError(
                        "main_grad is None while a backward is captured into a CUDA graph, and "
                        "every replay would zero the memory made for it; needed: main_grad "
                        "allocated before the capture"
                    )
                self._held[id(parameter)] = parameter, parameter.main_grad, _overwrites(parameter)

    def check(self) -> None:
        """Raise if gradients of a replay are where no optimizer looks, because a parameter's
        `main_grad` is no longer the captured one, or are added where they are to be written.
        """
        for parameter, memory, overwrites in self._held.values():
            now = getattr(parameter, "main_grad", None)
            if now is not memory and (now is None or data_ptr(now) != data_ptr(memory)):
                raise RuntimeError(
                    "the main_grad of an expert weight was replaced after a backward that adds to "
                    "it was captured into a CUDA graph, and replays add to the memory it had then; "
                    "needed: main_grad that stays in place (zeroed and not rebound), or another "
                    "capture; node.release_grads() forgets captured memory"
                )
            if _overwrites(parameter) is not overwrites:
                done = "writes" if overwrites else "adds to"
                raise RuntimeError(
                    "overwrite_main_grad of an expert weight changed after a backward that "
                    f"{done} its main_grad was captured into a CUDA graph, and replays go on so; "
                    "needed: the flag as it was, or another capture; node.release_grads() forgets "
                    "captured memory"
                )


def _overwrites(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "overwrite_main_grad", False))
