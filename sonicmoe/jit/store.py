"""One directory of published artefacts, shared by many processes and hosts.

<root>/artefacts/<kernel>/<digest>/     a published artefact: its files and manifest.json; never changed in place
<root>/staging/<kernel>-<digest>.*/     the private directory of one running build
<root>/locks/<kernel>-<digest>.*        the lock of a key and the note of its holder
<root>/quarantine/<kernel>-<digest>.*/  damaged artefacts, kept for inspection
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..log import logger
from . import files
from .errors import CompileError
from .files import DamagedFileError, describe_problem
from .key import CompileKey
from .lock import PUBLISHED, KeyLock
from .manifest import MANIFEST, Artefact, describe
from .place import Place, Trust
from .reader import ArtefactReader

Builder = Callable[[Path], None]
SCRATCH = ".scratch"  # a builder's intermediate files, below its private directory; not published
_KEPT_IN_QUARANTINE = 3
# Errors of the publishing rename that mean "another process may have published already": the target
# exists (EEXIST, ENOTEMPTY), or the source is gone because an NFS client repeated a request that
# the server had carried out before (ENOENT, ESTALE).
# Such an error is no verdict. `_publish` looks for the artefact before it believes the error.
_RACE_ERRNOS = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE}


# `CompileCache` has to tell two kinds of failure apart. A compiler that refuses the source refuses
# it in every directory, so its error goes to the caller. A full or read-only directory only moves
# the build to another directory.
class StoreProblemError(Exception):
    """The directory, and not the compiler, failed. Internal: `CompileCache` turns it into a
    fallback or a message.
    """

    def __init__(self, root: Path, reason: str) -> None:
        """A problem of `root`; `reason` is one clause for people."""
        super().__init__(f"{root}: {reason}")
        self.reason = reason


class ArtefactStore(ArtefactReader):
    """Publishes complete directories by one rename and reads them back verified.

    A builder fills a private directory below `staging/`, and one rename gives it its final name. The
    lock of a key only saves work: without it several processes would compile the same kernel, and
    the first rename would win.
    """

    def __init__(self, root: Path, trust: Trust, lock_timeout_s: float) -> None:
        """A store below `root`, which need not exist.

        Args:
            root: the directory.
            trust: who may be able to write there; nothing is read or written otherwise.
            lock_timeout_s: longest wait for another builder of the same key, seconds.
        """
        super().__init__(root, trust)
        self._lock_timeout_s = lock_timeout_s

    def build(self, key: CompileKey, builder: Builder) -> Artefact:
        """The published artefact of `key`, built by `builder(private directory)` if there is none.
        Idempotent. CompileLockTimeout where another process builds it for too long,
        StoreProblemError where the directory cannot take it, and whatever `builder` raises; nothing
        is published then.
        """
        lock = self.lock(key)
        with self._as_store_problem():
            # Waiting ends early when the other process publishes; then the lock is not held.
            found = lock.acquire(lambda: self.lookup(key).artefact)
        if found is not None:
            return found
        # The lock is held through the build, the rename, and the wait until the artefact is
        # visible, so the next holder finds it instead of building again.
        try:
            with self._as_store_problem():
                found = self._clear_the_way(key, lock)
                if found is not None:
                    return found
                staging = self._staging(key, lock)
            return self._filled(key, lock, staging, builder)
        finally:
            lock.release()

    def lock(self, key: CompileKey) -> KeyLock:
        return KeyLock(self.place / "locks", key, self._lock_timeout_s)

    def quarantine(self, key: CompileKey, reason: str) -> None:
        """Move a damaged artefact out of the way; call with the key's lock held.

        It is moved and not deleted in place, because another process may have loaded files of it:
        a rename leaves their open descriptors and mappings valid.
        """
        source, folder = self.place_of(key), self.place / "quarantine"
        folder.checked(make=True)
        name = f"{key.kernel}-{key.digest}"
        target = folder / f"{name}.{secrets.token_hex(4)}"
        files.publish(source, target)
        logger.warning("damaged artefact of %s: %s; moved to %s and rebuilt", key, reason, target)
        # A disk that damages the same artefact again and again must not fill up with copies. The
        # first few are kept, so the newest one goes.
        kept = [entry for entry in files.names(folder) if entry.startswith(name)]
        if len(kept) > _KEPT_IN_QUARANTINE:
            files.remove_tree(target)

    def _clear_the_way(self, key: CompileKey, lock: KeyLock) -> Artefact | None:
        """With the lock just acquired: look again, and move a damaged artefact away.

        The first look was before the wait for the lock, so another process may have published
        since. If the last holder ran on another host and says that it published, an NFS client here
        may still list the directory from its cache: wait for that artefact before compiling it
        again.
        """
        found = self.lookup(key)
        missing = found.artefact is None and not found.damaged and not found.unreadable
        if missing and lock.published_elsewhere():
            found = self.await_visible(key)
        # What could not be read may be intact. It stays, and the build goes to another directory.
        if found.unreadable:
            raise StoreProblemError(self.root, found.reason.removeprefix(f"{self.root} "))
        # A rename refuses a target that is not empty, so the damaged directory has to leave the
        # name before the new build can take it.
        if found.damaged:
            self.quarantine(key, found.reason)
        return found.artefact

    def _staging(self, key: CompileKey, lock: KeyLock) -> Place:
        """A private directory for a build. `staging/` lies below the same root, because a rename is
        atomic only inside one file system.
        """
        # The random part keeps two builders apart even where the file system has no locks and both
        # hold "the" lock.
        name = f"{key.kernel}-{key.digest}.{socket.gethostname()}.{secrets.token_hex(4)}"
        # Without a working lock, a directory in staging/ may belong to a live builder.
        if lock.native:
            self._sweep(key, lock)
        staging = self.place / "staging" / name
        staging.checked(make=True)
        return staging

    def _sweep(self, key: CompileKey, lock: KeyLock) -> None:
        """Remove the private directories of killed builds of this key, whose lock the caller holds.

        The operating system drops a lock when its holder dies, also by SIGKILL. The caller holds
        the lock now, so no directory of this key has a live owner. That conclusion fails on NFS
        that is mounted with node-local locks, where two hosts can both hold "the" lock. Then this
        may remove the directory of a live build, which fails or is repeated: no damaged artefact
        becomes visible.
        """
        folder = self.place / "staging"
        for name in files.names(folder):
            if name.startswith(f"{key.kernel}-{key.digest}."):
                pid, host = lock.previous.get("pid", "?"), lock.previous.get("host", "?")
                logger.warning(
                    "an earlier build of %s (pid %s on %s) ended before it was complete", key, pid, host
                )  # fmt: skip
                files.remove_tree(folder / name)

    def _filled(self, key: CompileKey, lock: KeyLock, staging: Place, builder: Builder) -> Artefact:
        """Build in the private directory and publish it; leaves nothing behind where that fails."""
        artefact = None
        try:
            # Asked before the compiler runs, because a compile takes seconds and a kernel that
            # cannot be stored is compiled again.
            with self._as_store_problem():
                files.probe(staging.checked())
            started = time.monotonic()
            builder(staging.path)
            artefact = self._publish(key, staging, time.monotonic() - started)
        except StoreProblemError:
            raise
        except Exception:
            # A compiler on a full disk fails with its own words and its own error type, so a write of
            # our own tells whether the directory was the cause.
            with self._as_store_problem():
                files.probe(staging.checked())
            raise
        finally:
            # Publication moved the directory away.
            if artefact is None:
                files.remove_tree(staging)
        with suppress(OSError):  # it only shortens other hosts' waits
            lock.note(PUBLISHED)
        return artefact

    def _publish(self, key: CompileKey, staging: Place, seconds: float) -> Artefact:
        """Write the manifest and publish `staging`; if another process was faster, its artefact is
        used. StoreProblemError where the directory cannot take it, or does not show it within the
        bounded wait.
        """
        try:
            self._write(key, staging, seconds)
            found = self.await_visible(key)
        except DamagedFileError as damage:
            raise CompileError(
                f"{key}: the build left something that {damage}, and only files can be stored"
            ) from damage
        except OSError as error:
            # A failed rename is no failure if an intact artefact is visible afterwards. Without
            # working locks another process may have published first. A network file system may
            # also carry out a rename, lose the answer, repeat the request, and report that the
            # source is gone. Neither the error nor the file system's word decides: the look does.
            # Only after a lost race can an artefact be on its way, so else one look is enough.
            look = self.await_visible if error.errno in _RACE_ERRNOS else self.lookup
            found = look(key)
            if found.artefact is None:
                raise StoreProblemError(self.root, describe_problem(error)) from error
            files.remove_tree(staging)
        if found.artefact is None:
            words = f"it does not show the artefact that was published: {found.reason}"
            raise StoreProblemError(self.root, words)
        return found.artefact

    def _write(self, key: CompileKey, staging: Place, seconds: float) -> None:
        """Finish `staging` and rename it. Everything is flushed before the rename, so that a power
        cut cannot leave a complete name over incomplete files.
        """
        target = self.place_of(key)
        # The order matters. Scratch files are gone before the manifest lists the files, and the
        # manifest is written and flushed last, so the rename publishes nothing that a power cut
        # could still take away.
        files.remove_tree(staging / SCRATCH)
        manifest = json.dumps(describe(key, files.sync_files(staging), seconds), indent=1)
        files.write_text(staging / MANIFEST, manifest)
        files.sync_dir(staging.checked())
        target.parent.checked(make=True)
        files.publish(staging, target)

    @contextmanager
    def _as_store_problem(self) -> Iterator[None]:
        try:
            yield
        # TimeoutError is a subclass of OSError, and CompileLockTimeout one of TimeoutError. Without
        # this clause, a wait that took too long would count as a broken directory and the build
        # would move to another one.
        except TimeoutError:
            raise
        except OSError as error:
            raise StoreProblemError(self.root, describe_problem(error)) from error
