"""Forbidding compilation: how a training run proves that warm-up covered it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..config import current_config
from .errors import CompileForbiddenError

if TYPE_CHECKING:
    from .key import CompileKey

# One counter for the process and not one per thread, because backward runs on threads of the
# framework's autograd, which never entered the `with` block.
_LOCK = threading.Lock()
_DEPTH = 0


@contextmanager
def no_compile() -> Iterator[None]:
    """Inside the block, any compile by any thread of this process raises CompileForbiddenError;
    loading does not.

    Nests. SONIC_MOE_FORBID_COMPILE=1 does the same for a whole process and its children.
    """
    global _DEPTH
    with _LOCK:
        _DEPTH += 1
    try:
        yield
    finally:
        with _LOCK:
            _DEPTH -= 1


def forbidden_by() -> str | None:
    """The name of the ban on compilation in force ("no_compile()" or the variable), or None."""
    # Read without the lock: a compile that starts while another thread leaves the block may count
    # as either side of it.
    if _DEPTH:
        return "no_compile()"
    return "SONIC_MOE_FORBID_COMPILE=1" if current_config().forbid_compile else None


def check_compile_allowed(key: CompileKey, why: str) -> None:
    """Raise CompileForbiddenError naming the kernel, its key and `why` no artefact could be used,
    if forbidden.
    """
    source = forbidden_by()
    if source:
        raise CompileForbiddenError(
            f"{source} is in force and a compile is needed: {key} ({why}). Run `sonicmoe warmup` for this model with the "
            "same cache directory and package versions, or allow compilation."
        )
