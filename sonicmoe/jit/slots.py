"""Places for compile processes, shared by all ranks of a host, claims on the kernels that they
compile, and the right to say what all of them meet.

All are locked files in a directory of this node. The operating system releases a lock when the
last process that holds its open file ends, also by SIGKILL, so none of them ever stays behind.
"""

from __future__ import annotations

import hashlib
import logging
import math
import socket
from collections.abc import Iterable
from pathlib import Path

from ..log import log_once
from . import cpus
from .files import describe_problem
from .lock import Held, try_lock
from .place import Place, Trust

AUTO, OFF = "auto", "off"
# Open for the life of the process, which is how long the other ranks leave a line to it.
_SAYING: list[Held] = []


def may_say(local_root: Path, line: str) -> bool:
    """Whether no other living process of this host has said `line`, for which it asked with the same
    `local_root`. A later run may say it again. True also where that directory cannot be used.
    """
    # Hosts may share the directory all the same.
    of_this_host = f"{socket.gethostname()} {line}".encode()
    name = f"said-{hashlib.sha256(of_this_host).hexdigest()[:16]}"
    try:
        held = try_lock(_folder(local_root).checked(make=True) / f"{name}.lock")
    # A line that is said eight times is better than one that nobody says.
    except OSError:
        return True
    if held is not None:
        _SAYING.append(held)
    return held is not None


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
        held: list[Held] = []
        try:
            if self._shared:
                folder = self._folder.checked(make=True)
                for names in groups:
                    locks = (try_lock(folder / f"{name}.lock") for name in names)
                    free = next((lock for lock in locks if lock is not None), None)
                    if free is None:
                        Held.of(held).release()
                        return None
                    held.append(free)
        except OSError as error:
            # Without the directory this process keeps to its own number of compilers.
            self._shared = False
            why = describe_problem(error)
            line = f"{self._folder}: the ranks of this host cannot share their compilers ({why})"
            log_once(logging.WARNING, "%s", line)
        return Held.of(held)


def _folder(local_root: Path) -> Place:
    return Place.of(local_root, Trust.OWNER) / "slots"


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
