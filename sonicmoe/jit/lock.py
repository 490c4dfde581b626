"""One builder at a time per key: a lock that the operating system releases when its holder dies,
and a note that names the holder.

Who may keep a lock, and for how long:
* A process that ends, even by SIGKILL, loses its locks at once. A child that it forked while it
  held the lock shares the open file and keeps the lock; the timeout message names that case.
* A host that dies on NFS cannot release anything. Its server keeps the lock until the lease of that
  client ends. A waiter cannot tell this from a long build, so it raises after the bounded wait, and
  the note says which host to look at.
* A file system without locks (ENOLCK, ENOSYS) lets everybody in. Publication by one rename keeps
  the store correct; kernels may then be compiled more than once.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from ..log import logger
from .errors import CompileLockTimeout
from .files import StoreFiles
from .key import CompileKey
from .manifest import utc_now
from .place import FILE_BITS, Place, inherited_mode

Found = TypeVar("Found")

BUILDING, PUBLISHED, FAILED = "building", "published", "failed"
_POLL_S = 0.1
# A waiter looks for the artefact this often, and so returns soon after a publication although the
# builder still holds the lock.
_SLICE_S = 2.0
# Errors of a file system that has no locks. Any other error, such as a full disk, is a problem of
# the directory and goes to the caller.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
# filelock can fall back to a "soft" lock: a file that exists. That file survives SIGKILL and would
# block everybody for ever, so no fallback is taken.
NATIVE_ONLY: dict[str, Any] = (
    {"fallback_to_soft": False}
    if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
    else {}
)


def file_lock(folder: Place, name: str) -> Any:
    """The lock `<name>.lock` in an existing directory, not yet acquired. filelock opens the path
    without following a link; the directory is judged here. OSError where the directory cannot be
    opened, or somebody else could have planted it.
    """
    path = folder.checked()
    mode = inherited_mode(os.stat(path), FILE_BITS)
    return FileLock(str(path / f"{name}.lock"), mode=mode, **NATIVE_ONLY)


@contextmanager
def nobody_holds(folder: Place, name: str) -> Iterator[bool]:
    """Whether a lock is free, which is held meanwhile. Errors as `file_lock`, and OSError or
    NotImplementedError where there are no locks.
    """
    lock = file_lock(folder, name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        _release(lock, name)


def _release(lock: Any, name: str) -> None:
    """Give a lock back, and say so in the log where the system refuses twice."""
    for _ in range(2):
        try:
            lock.release()
            return
        except OSError as error:
            refused = error
    logger.warning(
        "the lock %s could not be given back (%s); the end of this process frees it", name, refused
    )


class KeyLock:
    """The lock of one key, on a path outside the directory that is built.

    `<name>.lock` is never deleted or replaced. If it were, one process could hold a lock on the old
    inode while another locks the new one, and both would build.
    `<name>.json` beside it says who holds the lock, since when, and how the last build ended. Only
    messages and the second look after a publication on another host read it, so a wrong clock does
    no harm.

    native: whether the lock is one of the operating system. previous: the note of the last holder.
    """

    def __init__(
        self, folder: Place, key: CompileKey, timeout_s: float, files: StoreFiles, host: str
    ) -> None:
        """A lock in `folder` (created on acquire) that waits `timeout_s` seconds at most."""
        self._key, self._timeout_s, self._files = key, timeout_s, files
        self._folder, self._name = folder, f"{key.kernel}-{key.digest}"
        self._note = folder / f"{self._name}.json"
        self._host = host
        # `None` also while the lock is "held" on a file system without locks: there is nothing to
        # release then.
        self._lock: Any = None
        self.native = True
        self.previous: dict[str, Any] = {}

    def acquire(self, published: Callable[[], Found | None]) -> Found | None:
        """Wait for the lock. Returns None once it is held. Returns early the artefact that
        `published()` finds; then the lock is not held. CompileLockTimeout, which names the holder,
        where the bounded wait is over; OSError where the lock file cannot be created.
        """
        self._files.make_dir(self._folder)
        lock = file_lock(self._folder, self._name)
        # The wait is cut into slices of two seconds, because filelock can wait for the lock only
        # and this caller waits for the lock or the artefact. `monotonic` ignores changes of the
        # wall clock.
        deadline = time.monotonic() + self._timeout_s
        while True:
            remaining = deadline - time.monotonic()
            try:
                lock.acquire(timeout=min(_SLICE_S, max(remaining, 0)), poll_interval=_POLL_S)
            except Timeout:
                # The artefact is looked for before the deadline is checked, so a publication in the
                # last slice still counts.
                found = published()
                if found is not None:
                    return found
                if time.monotonic() >= deadline:
                    raise CompileLockTimeout(self.timeout_message()) from None
                continue
            # Where there are no locks, filelock passes on the errno or raises NotImplementedError.
            except (OSError, NotImplementedError) as error:
                self._without_native_lock(error)
                lock = None
            self._lock = lock
            # Read before it is overwritten: the sweep of dead builds and the wait for another
            # host's publication both ask how the last holder ended.
            self.previous = self._read_note()
            try:
                # A directory that cannot take a note of a few bytes cannot take a kernel either.
                # The lock is given back before the error leaves, because the caller never learns
                # that it was held.
                self.note(BUILDING)
            except OSError:
                self.release()
                raise
            return None

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
        self._files.write_text(self._note, json.dumps(holder))

    def is_held(self) -> bool:
        """Whether another process holds the lock at this moment; writes nothing."""
        try:
            if f"{self._name}.lock" not in self._files.names(self._folder):
                return False
            with nobody_holds(self._folder, self._name) as free:
                return not free
        except (OSError, NotImplementedError):  # no locks here, or no right to lock
            return False

    # Repeated calls are harmless: the `finally` of a caller may follow a release of its own.
    def release(self) -> None:
        """Let the next waiter in. Never raises, because the build is over and its result counts."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _release(lock, str(self._folder / self._name))

    def published_elsewhere(self) -> bool:
        """Whether the last holder ran on another host and reported a publication that may not be
        visible here yet.
        """
        return self.previous.get("state") == PUBLISHED and self.previous.get("host") != self._host

    def _without_native_lock(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise error
        self.native = False
        logger.warning(
            "%s: the file system has no file locks (%s); processes that start together may each build a kernel, and "
            "the first to publish wins", self._folder, error,
        )  # fmt: skip

    def _read_note(self) -> dict[str, Any]:
        # A damaged note reads as no note, and only the wording of messages suffers.
        note = self._files.read_json(self._note)
        return note if isinstance(note, dict) else {}

    def timeout_message(self) -> str:
        """Who holds the lock and what to do, for a wait that took too long."""
        note = self._read_note()
        # A process id means something on its own host only.
        pid, host, since = (note.get(name, "unknown") for name in ("pid", "host", "since"))
        # Only a process of this host can be asked whether it lives. If it is gone and the lock is
        # not, the open file must have been inherited by a child.
        gone = host == self._host and isinstance(pid, int) and not _alive(pid)
        hint = (
            "that process is gone, so one of its forked children keeps the lock: end it"
            if gone
            else "if it hangs, end that process, which frees the lock; if its host died on NFS, wait for "
            "the server's lease to end"
        )
        return (
            f"waited {self._timeout_s:g} s for {self._key}, which is being built by pid {pid} on host {host} since {since} "
            f"(lock {self._folder / self._name}.lock); {hint}, or raise SONIC_MOE_LOCK_TIMEOUT"
        )


def _alive(pid: int) -> bool:
    try:
        # Signal 0 is not delivered; the call only checks that the process exists. EPERM means that
        # it exists and belongs to another user.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
