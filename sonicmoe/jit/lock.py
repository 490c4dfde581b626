"""One builder at a time per key: a lock that the operating system releases when its holder dies,
and a note that names the holder. And the right to say what all ranks of a host meet.

Who may keep a lock, and for how long:
* A process that ends, even by SIGKILL, loses its locks at once. A child that it forked gives up
  its copies; one that another library started with them keeps the lock.
* A host that dies on NFS cannot release anything. Its server keeps the lock until the lease of that
  client ends. A waiter cannot tell this from a long build, so it raises after the bounded wait, and
  the note says which host to look at.
* A file system without locks (ENOLCK, ENOSYS) lets everybody in. Publication by one rename keeps
  the store correct; kernels may then be compiled more than once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ..log import logger
from . import files
from .errors import CompileLockTimeout
from .key import CompileKey
from .manifest import utc_now
from .place import FILE_BITS, Place, Trust, inherited_mode, set_mode

Found = TypeVar("Found")

BUILDING, PUBLISHED = "building", "published"
_POLL_S = 0.25
_HELD_BY_ANOTHER = {errno.EAGAIN, errno.EACCES}
# Errors of a file system that has no locks. Any other error, such as a full disk, is a problem of
# the directory and goes to the caller.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


class Held:
    """A locked file, until `release` or until this process ends."""

    def __init__(self, descriptor: int) -> None:
        """Take over an open, locked descriptor."""
        self._descriptor = descriptor
        _HELD.add(self)

    def release(self, *, in_parent: bool = False) -> None:
        """Unlock now, whichever forked process has a copy; `in_parent`: close this copy alone.
        Idempotent; never raises.
        """
        if self not in _HELD:
            return
        _HELD.discard(self)
        with suppress(OSError):  # then closing unlocks
            if not in_parent:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with suppress(OSError):  # Linux frees the number whatever close reports
            os.close(self._descriptor)


_HELD: set[Held] = set()


def _leave_to_the_parent() -> None:
    """In a forked child, for example a data loader: close its copies, which keep the locks alive."""
    for held in list(_HELD):
        held.release(in_parent=True)


os.register_at_fork(after_in_child=_leave_to_the_parent)


def try_lock(path: Path, mode: int = 0o600) -> Held | None:
    """The lock of a file, which is made with `mode` where it is absent; None while another process
    holds it. It follows no link, and its caller has judged the directory. OSError where the file
    cannot be opened, or its file system has no locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_nlink == 1:
            set_mode(descriptor, mode)  # the umask may have taken a part of it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _HELD_BY_ANOTHER:
            return None
        raise
    return Held(descriptor)


def may_say(local_root: Path, line: str) -> bool:
    """Whether no other living process of this host has said `line`, for which it asked with the same
    `local_root`. A later run may say it again. True also where that directory cannot be used.
    """
    # Hosts may share the directory all the same.
    of_this_host = f"{socket.gethostname()} {line}".encode()
    name = f"said-{hashlib.sha256(of_this_host).hexdigest()[:16]}.lock"
    try:
        # Locked for the life of the process, which is how long the other ranks leave the line to it.
        folder = Place.of(local_root, Trust.OWNER) / "said"
        return try_lock(folder.checked(make=True) / name) is not None
    # A line that is said eight times is better than one that nobody says.
    except OSError:
        return True


class KeyLock:
    """The lock of one key, on a path outside the directory that is built.

    `<name>.lock` is never deleted or replaced. If it were, one process could hold a lock on the old
    inode while another locks the new one, and both would build.
    `<name>.json` beside it says who holds the lock, since when, and how the last build ended. Only
    messages and the second look after a publication on another host read it, so a wrong clock does
    no harm.

    native: whether the lock is one of the operating system. previous: the note of the last holder.
    """

    def __init__(self, folder: Place, key: CompileKey, timeout_s: float) -> None:
        """A lock in `folder` (created on acquire) that waits `timeout_s` seconds at most."""
        self._key, self._timeout_s = key, timeout_s
        self._folder, self._name = folder, f"{key.kernel}-{key.digest}"
        self._note = folder / f"{self._name}.json"
        self._host = socket.gethostname()
        # `None` also while the lock is "held" on a file system without locks: there is nothing to
        # release then.
        self._held: Held | None = None
        self.native = True
        self.previous: dict[str, Any] = {}

    def acquire(self, published: Callable[[], Found | None]) -> Found | None:
        """Wait for the lock. Returns None once it is held. Returns early the artefact that
        `published()` finds; then the lock is not held. CompileLockTimeout, which names the holder,
        where the bounded wait is over; OSError where the lock file cannot be created.
        """
        self._folder.checked(make=True)
        # `monotonic` ignores changes of the wall clock.
        deadline = time.monotonic() + self._timeout_s
        while not self._lock():
            # The builder may have published and hang on its way out. Looked for before the deadline
            # counts, so a publication in the last moment does.
            found = published()
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise CompileLockTimeout(self.timeout_message())
            time.sleep(_POLL_S)
        # Read before it is overwritten: the sweep of dead builds and the wait for another host's
        # publication both ask how the last holder ended.
        self.previous = self._read_note()
        try:
            # A directory that cannot take a note of a few bytes cannot take a kernel either. The
            # lock is given back before the error leaves, because the caller never learns that it
            # was held.
            self.note(BUILDING)
        except OSError:
            self.release()
            raise
        return None

    def _lock(self) -> bool:
        """Whether this process has the lock now, or there are none here."""
        folder = self._folder.checked()
        mode = inherited_mode(os.stat(folder), FILE_BITS)
        try:
            self._held = try_lock(folder / f"{self._name}.lock", mode)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.native = False
            logger.warning(
                "%s: the file system has no file locks (%s); processes that start together may each build a kernel, and "
                "the first to publish wins", self._folder, error,
            )  # fmt: skip
            return True
        return self._held is not None

    def note(self, state: str) -> None:
        """Record the holder and its state, for messages. OSError where it cannot be written; then
        the directory cannot take a build either.
        """
        holder = {
            "pid": os.getpid(),
            "host": self._host,
            "since": utc_now(),
            "kernel": self._key.kernel,
            "state": state,
        }
        files.write_text(self._note, json.dumps(holder))

    # Repeated calls are harmless: the `finally` of a caller may follow a release of its own.
    def release(self) -> None:
        """Let the next waiter in. Never raises, because the build is over and its result counts."""
        if self._held is not None:
            self._held.release()

    def published_elsewhere(self) -> bool:
        """Whether the last holder ran on another host and reported a publication that may not be
        visible here yet.
        """
        return self.previous.get("state") == PUBLISHED and self.previous.get("host") != self._host

    def _read_note(self) -> dict[str, Any]:
        # A damaged note reads as no note, and only the wording of messages suffers.
        note = files.read_json(self._note)
        return note if isinstance(note, dict) else {}

    def timeout_message(self) -> str:
        """Who holds the lock and what to do, for a wait that took too long."""
        note = self._read_note()
        # A process id means something on its own host only.
        pid, host, since = (note.get(name, "unknown") for name in ("pid", "host", "since"))
        hint = (
            "if it hangs, or is gone and a child of it lives on, end that process, which frees the "
            "lock; if its host died on NFS, wait for the server's lease to end"
        )
        return (
            f"waited {self._timeout_s:g} s for {self._key}, which is being built by pid {pid} on host {host} since {since} "
            f"(lock {self._folder / self._name}.lock); {hint}, or raise SONIC_MOE_LOCK_TIMEOUT"
        )
