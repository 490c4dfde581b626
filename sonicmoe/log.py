"""The package's log, and lines that a process says once. A leaf: imports nothing of the package."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

logger = logging.getLogger("sonicmoe")

_LOCK = threading.Lock()
_seen: set[Hashable] = set()


def first_time(key: Hashable) -> bool:
    """Whether nobody in this process has asked this with an equal key before."""
    # Layers ask in every forward, so a known key costs no lock.
    if key in _seen:
        return False
    with _LOCK:
        known = key in _seen
        _seen.add(key)
    return not known


def log_once(level: int, message: str, *arguments: Hashable, key: Hashable | None = None) -> None:
    """Log a line, unless this process has said it before.

    Args:
        level: of `logging`.
        message: with a `%s` for each argument.
        arguments: what the line is about; another argument makes another line.
        key: what makes two lines the same one, in place of the message and its arguments.
    """
    if first_time((message, arguments) if key is None else key):
        logger.log(level, message, *arguments)


def forget_what_was_said() -> None:
    """Say every line again the next time. For tests, each of which is a process of its own here."""
    with _LOCK:
        _seen.clear()
