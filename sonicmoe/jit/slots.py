"""Places for compile processes, shared by all ranks of a host, claims on the kernels that they
compile, and the right to say what all of them meet.

All are locked files in a directory of this node. The operating system releases a lock when the
last process that holds its open file ends, also by SIGKILL, so none of them ever stays behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import math
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from ..log import log_once
from . import cpus
from .files import describe_problem
from .place import Place, Trust

AUTO, OFF = "auto", "off"
_HELD_BY_ANOTHER = {errno.EAGAIN, errno.EACCES}
# Open for the life of the process, which is how long the other ranks leave a line to it.
_SAYING: list[int] = []


def may_say(local_root: Path, line: str) -> bool:
    """Whether no other living process of this host has said `line`, for which it asked with the same
    `local_root`. A later run may say it again. True also where that directory cannot be used.
    """
    # Hosts may share the directory all the same.
    of_this_host = f"{socket.gethostname()} {line}".encode()
    name = f"said-{hashlib.sha256(of_this_host).hexdigest()[:16]}"
    try:
        descriptor = _lock(_folder(local_root).checked(make=True), name)
    # A line that is said eight times is better than one that nobody says.
    except OSError:
        return True
    if descriptor is not None:
        _SAYING.append(descriptor)
    return descriptor is not None


class Held:
    """Locked files. The locks end with `release`, or with the last process that has `descriptors`
    open.
    """

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        """Take over open, locked descriptors."""
        self.descriptors = descriptors

    def release(self) -> None:
        """Unlock now, whichever process has inherited the descriptors. Idempotent."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            # Closing alone would not unlock: a data loader that was forked meanwhile has a copy.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class HostSlots:
    """As many places as compilers may run at once, over all processes that share CPUs or a quota.

    A place is one lock of every group: a CPU, and a share of the quota where there is one. Ranks
    that are pinned to CPUs of their own thus add up, and ranks that share CPUs share places.
    """

    def __init__(self, local_root: Path, limit: str | int = AUTO) -> None:
        """Places in a directory below `local_root`, the cache's directory on this node, which is made
        when the first one is taken; `limit`: a number of places, or "auto".
        """
        self._folder, self._groups = _folder(local_root), _groups(limit)
        self.count = min(map(len, self._groups))
        self._shared = True

    def take(self) -> Held | None:
        """A free place, or None while others have them all."""
        return self._held(self._groups)

    def claim(self, name: str) -> Held | None:
        """The exclusive right to `name` on this host, or None while another process has it."""
        return self._held([(name,)])

    def _held(self, groups: Iterable[tuple[str, ...]]) -> Held | None:
        """One lock of every group, or None."""
        descriptors: list[int] = []
        try:
            if self._shared:
                folder = self._folder.checked(make=True)
                for names in groups:
                    free = (_lock(folder, name) for name in names)
                    descriptors.append(next(held for held in free if held is not None))
        except StopIteration:
            Held(tuple(descriptors)).release()
            return None
        except OSError as error:
            # Without the directory this process keeps to its own number of compilers.
            self._shared = False
            why = describe_problem(error)
            line = f"{self._folder}: the ranks of this host cannot share their compilers ({why})"
            log_once(logging.WARNING, "%s", line)
        return Held(tuple(descriptors))


def _folder(local_root: Path) -> Place:
    return Place.of(local_root, Trust.OWNER) / "slots"


def _lock(folder: Path, name: str) -> int | None:
    """The descriptor of the locked file, which a child inherits only where it is told to; None while
    another process holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(folder / f"{name}.lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _HELD_BY_ANOTHER:
            return None
        raise
    return descriptor


def _groups(limit: str | int) -> tuple[tuple[str, ...], ...]:
    if limit != AUTO:
        return (_numbered("process", int(limit)),)
    groups = [tuple(f"cpu-{number}" for number in cpus.affinity())]
    found = cpus.quota()
    if found is not None:
        groups.append(_numbered(f"quota-{found.group}", max(1, math.ceil(found.cpus))))
    return tuple(groups)


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}-{number}" for number in range(count))
