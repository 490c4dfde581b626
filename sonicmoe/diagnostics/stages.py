"""Names on the stages of a call, for profilers and for `bisect`. A leaf: imports nothing of the
package, and no framework.

An engine writes

    with stage("up"):                 # a range on the profiler's timeline
        y1, z = ...
    y1 = tap("y1", y1)                # shows a stage tensor to whoever listens

and pays two reads of a global where nobody listens: no allocation, no kernel, no framework call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

Value = TypeVar("Value")
RangeFactory = Callable[[str], AbstractContextManager[Any]]
Listener = Callable[[str, Any], Any]

RANGE_PREFIX = "sonicmoe."
_SILENT = nullcontext()
_ranges: RangeFactory | None = None
_listener: Listener | None = None


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
        listener if before is None else lambda name, value: listener(name, before(name, value))
    )
    try:
        yield
    finally:
        _listener = before
