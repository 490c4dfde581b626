"""Functions in forked processes: as another user, or killed in the middle.

A fork and not a new interpreter, because that of this machine may lie where other users cannot read.
"""

from __future__ import annotations

import ctypes
import io
import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
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


class Child:
    """A forked process that runs `work`; in a session and, with `mounts`, a mount namespace of its
    own, which that shell line sets up.
    """

    def __init__(
        self, work: Callable[[], Any], user: User | None = None, mounts: str | None = None
    ) -> None:
        reader, writer = os.pipe()

        def answer() -> None:
            os.setsid()
            if mounts is not None:
                assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
                setup = f"mount --make-rprivate / && {mounts}"
                subprocess.run(["sh", "-c", setup], check=True)
            said = io.StringIO()
            logging.getLogger("sonicmoe").addHandler(logging.StreamHandler(said))
            try:
                result = work()
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps([result, said.getvalue()]).encode())

        self.pid = start(answer, user)
        os.close(writer)
        self._answers = os.fdopen(reader, "rb")

    def answer(self) -> tuple[Any, str]:
        """What `work` returned, or the exception that it raised, as text; and what was logged."""
        content = self._answers.read()
        os.waitpid(self.pid, 0)
        self._answers.close()
        assert content, "the process ended early"
        result, said = json.loads(content)
        return result, said

    def kill(self) -> None:
        """End it with everything that it started."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._answers.close()


def run_as(user: User | None, work: Callable[[], Any]) -> Any:
    """What `work` returns, or the exception that it raises, in a process of that user."""
    return Child(work, user).answer()[0]
