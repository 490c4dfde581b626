"""Errors that a kernel finds out, and the host, which does not wait for it, learns later."""

from __future__ import annotations

from collections.abc import Callable

_QUESTIONS: list[Callable[[], None]] = []


def ask_later(question: Callable[[], None]) -> None:
    """Have `question` asked at every `raise_found`. It waits for nothing, and raises what was found."""
    _QUESTIONS.append(question)


def raise_found() -> None:
    """Raise what any kernel has found out by now; waits for nothing."""
    for question in _QUESTIONS:
        question()
