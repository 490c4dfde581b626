"""Rows of the table of refusals: a call, what is changed about its sound arguments, and the words of the
error. A scene is a row whose call needs no change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Change = dict[str, Any] | Callable[[], dict[str, Any]]
Error = type[BaseException] | tuple[type[BaseException], ...]


class Row(NamedTuple):
    """change: arguments in the place of sound ones, or a function that makes them."""

    call: Callable[..., Any]
    change: Change
    error: Error
    words: str

    @property
    def is_scene(self) -> bool:
        return self.change == {}

    def run(self) -> None:
        self.call(**(self.change() if callable(self.change) else self.change))


def rows(call: Callable[..., Any], *given: tuple[Error, str, Change]) -> list[Row]:
    """Rows of one call: the error, its words, and the change."""
    return [Row(call, change, error, words) for error, words, change in given]


def scenes(*given: tuple[Error, str, Callable[[], Any]]) -> list[Row]:
    return [Row(call, {}, error, words) for error, words, call in given]
