"""Making any one system call of the cache fail: count the calls of a scene, then repeat the scene
and let the k-th one fail.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OS_CALLS = (
    "open", "close", "stat", "lstat", "fstat", "listdir", "scandir", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync",
    "fchmod", "chmod", "statvfs", "readlink", "fdopen",
)  # fmt: skip
FILE_CALLS = ("readinto", "readall", "read", "write", "truncate")


class SystemCalls:
    """The calls that the code under test makes, by number.

    fails: the number of the call that fails; `lasting` makes all later calls of its name fail too.
    """

    def __init__(self, fails: int = -1, number: int = 0, *, lasting: bool = False) -> None:
        self.fails, self.number, self.lasting = fails, number, lasting
        self.names: list[str] = []
        self.failed = ""
        self.suspended = False

    def pass_or_fail(self, name: str) -> None:
        if self.suspended:
            return
        self.names.append(name)
        if len(self.names) - 1 == self.fails or (self.lasting and name == self.failed):
            self.failed = name
            raise OSError(self.number, os.strerror(self.number))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, calls are not the cache's own: those of the compiler."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def not_counted(self, build: Callable[[Any], object]) -> Callable[[Any], None]:
        """A builder whose calls are its compiler's, and not the cache's own."""

        def run(folder: Any) -> None:
            with self.elsewhere():
                build(folder)

        return run

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, every system call passes through `pass_or_fail`."""
        with pytest.MonkeyPatch.context() as patch:
            for name in OS_CALLS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            patch.setattr(os, "fdopen", self._open_handle)
            patch.setattr(fcntl, "flock", self._wrapped("flock", fcntl.flock))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            try:
                self.pass_or_fail(name)
            except OSError:
                if name == "close":  # Linux frees the number whatever it reports
                    real(*args)
                raise
            return real(*args, **options)

        return call

    def _open_handle(self, descriptor: int, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "b" not in mode:
            return open(descriptor, mode, *args, **options)
        self.pass_or_fail("fdopen")
        raw = _handle_of(self, descriptor, mode)
        return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)


class ActingCalls(SystemCalls):
    """Does something right before the k-th system call instead of letting it fail."""

    def __init__(self, before: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.before, self.act = before, act

    def pass_or_fail(self, name: str) -> None:
        if self.suspended:
            return
        if len(self.names) == self.before:
            with self.elsewhere():
                self.act()
        self.names.append(name)


def _handle_of(calls: SystemCalls, descriptor: int, mode: str) -> io.FileIO:
    def wrapped(name: str) -> Callable[..., Any]:
        def call(self: io.FileIO, *args: Any) -> Any:
            calls.pass_or_fail(name)
            return getattr(io.FileIO, name)(self, *args)

        return call

    members = {name: wrapped(name) for name in FILE_CALLS}
    kind: Any = type("Handle", (io.FileIO,), members)
    handle: io.FileIO = kind(descriptor, mode)
    return handle
