"""Which kernels serve a device, decided once, unless what stood in the way may pass: then decided
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..errors import SonicMoEError
from .errors import (
    CacheUnwritableError,
    CompileError,
    CompileForbiddenError,
    CompileLockTimeout,
    KeyFieldError,
    ToolchainError,
)

logger = logging.getLogger("sonicmoe")

Choice = TypeVar("Choice")

NO_FALLBACK = (
    CompileForbiddenError,
    CompileLockTimeout,
)  # promised to reach the caller (docs/env.md)
FALLBACK = (SonicMoEError, ImportError, RuntimeError, OSError, AttributeError)
_LASTING = (CompileError, CacheUnwritableError, KeyFieldError, ImportError, AttributeError)
_LONGEST_PAUSE_S = 64.0


def may_pass(error: BaseException) -> bool:
    """Whether the same attempt may succeed later in this process: after a full GPU, not after a
    missing compiler.

    What takes a compile to find out lasts; that there is no compiler to replace what did not load
    (its cause) does not.
    """
    refused_after_load = isinstance(error, ToolchainError) and error.__cause__ is not None
    return refused_after_load or not isinstance(error, _LASTING)


class _Tentative(NamedTuple, Generic[Choice]):
    choice: Choice
    failures: int
    again_at: float


class Decided(Generic[Choice]):
    """Decorates `choose(device) -> (choice, errors on the way to it)`; called, gives the choice.

    A choice without errors that may pass is final. Any other serves until the next call, and after
    a second failure for a pause that
    doubles up to about a minute: attempts that keep failing must not slow every forward.
    """

    def __init__(self, choose: Callable[[str], tuple[Choice, Sequence[Exception]]]) -> None:
        """Nothing is decided yet."""
        self._choose = choose
        self._final: dict[str, Choice] = {}
        self._tentative: dict[str, _Tentative[Choice]] = {}
        self._said: set[str] = set()

    def __call__(self, device: str) -> Choice:
        """The choice for a device; errors as `choose`."""
        return self._final[device] if device in self._final else self._decide(device)

    def cache_clear(self) -> None:
        """Forget every decision and what was said, as of `functools.lru_cache`."""
        self._final.clear()
        self._tentative.clear()
        self._said.clear()

    def say(self, level: int, text: str) -> None:
        """Log a line, the first time."""
        if text not in self._said:
            self._said.add(text)
            logger.log(level, "%s", text)

    def _decide(self, device: str) -> Choice:
        earlier = self._tentative.get(device)
        if earlier is not None and time.monotonic() < earlier.again_at:
            return earlier.choice
        choice, errors = self._choose(device)
        if any(map(may_pass, errors)):
            failures = 1 if earlier is None else earlier.failures + 1
            pause = 0.0 if failures == 1 else min(2.0 ** (failures - 2), _LONGEST_PAUSE_S)
            self._tentative[device] = _Tentative(choice, failures, time.monotonic() + pause)
        else:
            self._final[device] = choice
            if self._tentative.pop(device, None) is not None:
                self.say(logging.INFO, f"kernels on {device}: what had stood in the way is gone")
        return choice
