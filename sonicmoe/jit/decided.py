"""The choice of kernels for a device: made once, and made again while its obstacle may be
temporary.

Without a memory, every forward would try to compile a kernel that cannot be compiled. With a plain
cache, a GPU that was full for one moment would leave a run on slow operations for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..errors import SonicMoEError
from .errors import (
    CacheUnwritableError,
    CompileError,
    CompileForbiddenError,
    CompileLockTimeout,
    KeyFieldError,
)

Choice = TypeVar("Choice")

# docs/env.md promises that these reach the caller, so no slower kernel may hide them.
NO_FALLBACK = (
    CompileForbiddenError,
    CompileLockTimeout,
)
# Errors after which a slower engine may be tried: those of this package, and those that imports,
# drivers and shared libraries raise.
FALLBACK = (SonicMoEError, ImportError, RuntimeError, OSError, AttributeError)
# Attempts after these errors end the same way in this process: the sources, the versions and the
# installed packages do not change while it runs.
_LASTING = (CompileError, CacheUnwritableError, KeyFieldError, ImportError, AttributeError)
_LONGEST_PAUSE_S = 64.0


def may_pass(error: BaseException) -> bool:
    """Whether the same attempt may succeed later in this process: a failed compile and a missing
    compiler are permanent, and a kernel that does not load may when the GPU has memory again.
    """
    return not isinstance(error, _LASTING)


class Decided(Generic[Choice]):
    """Decorates `choose(device) -> (choice, errors on the way to it)`; a call returns the choice.

    A choice is final unless one of its errors may pass. After a first such error the next call
    chooses again. After each further one a pause comes first, which doubles up to about a minute,
    so that repeated failures do not slow every forward.
    """

    def __init__(self, choose: Callable[[str], tuple[Choice, Sequence[Exception]]]) -> None:
        self._choose = choose
        self._final: dict[str, Choice] = {}
        # Choice, failures so far, and when to choose again.
        self._tentative: dict[str, tuple[Choice, int, float]] = {}

    def __call__(self, device: str) -> Choice:
        """The choice for a device; errors as `choose`."""
        # This runs in every forward, so the decided case is one look into a dictionary: no clock,
        # no lock.
        return self._final[device] if device in self._final else self._decide(device)

    def cache_clear(self) -> None:
        """Forget every decision, as of `functools.lru_cache`."""
        self._final.clear()
        self._tentative.clear()

    def _decide(self, device: str) -> Choice:
        failures = 0
        if device in self._tentative:
            choice, failures, again_at = self._tentative[device]
            if time.monotonic() < again_at:
                return choice
        choice, errors = self._choose(device)
        if any(map(may_pass, errors)):
            # The first repetition is immediate, so an obstacle of one moment, such as a full GPU,
            # costs one forward. From the second failure on the pauses are 1, 2, 4 ... seconds.
            pause = min(2.0 ** (failures - 1), _LONGEST_PAUSE_S) if failures else 0.0
            self._tentative[device] = choice, failures + 1, time.monotonic() + pause
        else:
            self._final[device] = choice
        return choice
