"""Functions in forked processes: as another user, or killed in the middle.

A fork and not a new interpreter, because that of this machine may lie where other users cannot read.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as other users; CI may not be root"
)


@dataclass(frozen=True)
class User:
    """A user and the groups it acts with; neither has to exist."""

    number: int
    groups: tuple[int, ...]
    umask: int = 0o022

    def become(self) -> None:
        os.setgroups(self.groups)
        os.setresgid(*[self.groups[0]] * 3)
        os.setresuid(*[self.number] * 3)
        os.umask(self.umask)


def start(work: Callable[[], object], user: User | None = None) -> int:
    """The process id of a child that runs `work`."""
    child = os.fork()
    if child:
        return child
    try:
        if user is not None:
            user.become()
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def end(child: int) -> int:
    """Kill a child, and its status."""
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def run_as(user: User | None, work: Callable[[], Any]) -> Any:
    """What `work` returns, or the exception that it raises, in a process of that user."""
    reader, writer = os.pipe()

    def answer() -> None:
        try:
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(result).encode())

    child = start(answer, user)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        content = answers.read()
    os.waitpid(child, 0)
    return json.loads(content)
