"""The file system operations of the artefact store, in one class so that tests can make them fail
or lag.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

_REASONS = {
    errno.EROFS: "it is on a read-only file system",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the file system reports an input/output error",
    errno.ESTALE: "the network file system has lost the directory",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
}
_PROBE_BYTES = 1 << 16


def describe_problem(error: OSError) -> str:
    """One clause for people: why a directory cannot be used."""
    reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}")
    return f"{reason} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


# Only the errnos above count. A builder's FileNotFoundError, for example, is a missing tool or
# source and not a broken directory.
def is_storage_problem(error: BaseException) -> bool:
    """Whether an exception out of a builder is the directory's fault and not the compiler's."""
    return isinstance(error, OSError) and error.errno in _REASONS


class StoreFiles:
    """Plain local operations. Subclass it to inject faults."""

    def make_dir(self, path: Path) -> None:
        """Create a directory and its parents; an existing one is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Sorted names in a directory; [] if it does not exist.

        It lists the directory instead of asking for one name, because an NFS client caches that a
        name is absent and answers `stat` from that cache for seconds after another host's rename.
        """
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def publish(self, source: Path, target: Path) -> None:
        """Make a complete directory appear under its final name in one step.

        Raises:
            OSError: a non-empty target exists, or the file system refuses.
        """
        os.rename(source, target)  # atomic, and refuses a target that is not empty
        self.sync_dir(target.parent)

    def sync_tree(self, folder: Path) -> None:
        """Flush every file and directory of a tree, so that a power cut cannot publish a hole."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                # fsync works on a file that was opened for reading, too. The compiler has closed
                # its own descriptors, so the file is opened once more.
                with open(path, "rb") as handle:
                    os.fsync(handle.fileno())
        self.sync_dir(folder)

    def sync_dir(self, folder: Path) -> None:
        """Flush a directory's entries where the file system can."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network file systems have no fsync for directories
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
                raise
        finally:
            os.close(descriptor)

    def write_text(self, path: Path, text: str) -> None:
        """Write and flush a small file in place. A reader may see it torn: see `read_json`."""
        with open(path, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())

    def read_json(self, path: Path) -> Any:
        """The parsed content, or None if it is absent, unreadable or torn."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def remove_tree(self, path: Path) -> None:
        """Delete a tree as far as possible; what cannot be deleted stays."""
        shutil.rmtree(path, ignore_errors=True)

    def probe(self, folder: Path) -> None:
        """Raise the OSError that a write of 64 KiB into `folder` meets, if any."""
        # The size is larger than a block and a typical inline file, so a full file system cannot
        # hide in metadata. fsync forces delayed allocation to happen now.
        path = folder / f".probe-{os.getpid()}"
        try:
            with open(path, "wb") as handle:
                handle.write(b"\0" * _PROBE_BYTES)
                handle.flush()
                os.fsync(handle.fileno())
        finally:
            path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_private(folder: Path) -> None:
    """Raise PermissionError unless only trusted users can write to an existing directory.

    Artefacts are code that this process loads and runs. In a shared temporary directory somebody
    else could have made a directory of this name first, so it must belong to this user or to root,
    and must not be world-writable.
    """
    status = os.lstat(folder)  # not stat: a symbolic link would lead to a directory of its maker
    trusted = status.st_uid in {os.getuid(), 0} and not status.st_mode & stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or not trusted:
        raise PermissionError(
            errno.EPERM,
            f"{folder} is not a directory that only this user can write; refusing to load code from it",
        )
