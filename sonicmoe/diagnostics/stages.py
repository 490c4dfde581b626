"""Names on the stages of a call, for profilers and for `bisect`, and events of whole calls, for
observers. A leaf: imports nothing of the package, and no framework.

An engine writes

    with stage("up"):                 # a range on the profiler's timeline
        y1, z = ...
    y1 = tap("y1", y1)                # shows a stage tensor to whoever listens

and the caller of an engine (the node) writes

    if is_awaited():
        emit(ForwardDone(...))    # an event of `call_events.py`

Each pays one read of a global where nobody listens: no allocation, no kernel, no framework call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

Value = TypeVar("Value")
RangeFactory = Callable[[str], AbstractContextManager[Any]]
Listener = Callable[[str, Any], Any]
Observer = Callable[[Any], None]

RANGE_PREFIX = "sonicmoe."
_SILENT = nullcontext()
_ranges: RangeFactory | None = None
_listener: Listener | None = None
# A tuple that is replaced and never changed: `emit` iterates over the one it found, so an observer
# may leave while it observes and no lock is held during a call.
_observers: tuple[Observer, ...] = ()
_observers_change = threading.Lock()


def stage(name: str) -> AbstractContextManager[Any]:
    """A range called `sonicmoe.<name>` around the launches of one stage; a shared null context
    while ranges are off.
    """
    return _SILENT if _ranges is None else _ranges(RANGE_PREFIX + name)


def is_heard() -> bool:
    """Whether somebody listens."""
    return _listener is not None


def is_observed() -> bool:
    """Whether ranges are on or somebody listens."""
    return _ranges is not None or _listener is not None


def tap(name: str, value: Value) -> Value:
    """Show a stage tensor (plain or block-scaled) to the listener and go on with what it returns;
    without one, `value` itself.
    """
    return value if _listener is None else _listener(name, value)


@contextmanager
def ranges_on(factory: RangeFactory) -> Iterator[None]:
    """Inside the block `stage` opens `factory(name)`; process-wide, because backward may run on
    another thread.
    """
    global _ranges
    before, _ranges = _ranges, factory
    try:
        yield
    finally:
        _ranges = before


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the block `tap(name, value)` returns `listener(name, value)`; process-wide. Listeners
    chain, the outermost first.
    """
    global _listener
    before = _listener
    _listener = (
        # The listener that was there first stays nearest to the engine, and the new one sees what
        # it returns.
        listener if before is None else lambda name, value: listener(name, before(name, value))
    )
    try:
        yield
    finally:
        _listener = before


def is_awaited() -> bool:
    """Whether anybody observes events; asked before an event is made."""
    return bool(_observers)


def emit(event: Any) -> None:
    """Hand an event to every observer, on this thread; an exception of an observer ends the call
    that emitted it.
    """
    for observer in _observers:
        observer(event)


def observe(observer: Observer) -> None:
    """Hand every event from now on to `observer`; process-wide, because backward may run on another
    thread.
    """
    global _observers
    with _observers_change:
        _observers = (*_observers, observer)


def forget(observer: Observer) -> None:
    """Take an observer away; twice is once."""
    global _observers
    with _observers_change:
        _observers = tuple(other for other in _observers if other is not observer)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """`observe` inside the block."""
    observe(observer)
    try:
        yield
    finally:
        forget(observer)
