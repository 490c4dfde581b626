"""The file system operations of the artefact store, in one class so that tests can make them fail
or lag.

Every operation opens the directory first, as `Place` prescribes, and then works on names relative
to that descriptor. It follows no link, does not wait at a FIFO, and reads regular files only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import Any, NamedTuple

from .place import (
    DIRECTORY,
    DIRECTORY_BITS,
    FILE_BITS,
    Place,
    UntrustedPlaceError,
    inherited_mode,
    set_mode,
)

_REASONS = {
    errno.EROFS: "it is on a read-only file system",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the file system reports an input/output error",
    errno.ESTALE: "the network file system has lost the directory",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.ETIMEDOUT: "the network file system does not answer",
    errno.EMFILE: "this process has too many open files",
    errno.ENFILE: "this machine has too many open files",
    errno.ENOMEM: "this machine is out of memory",
}
# The answers to opening a link, a socket, and a name that no file can have. Other errors say that
# the file system could not answer, which is no verdict on the entry.
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PROBE_BYTES = 1 << 16
_LEAST_FREE_BYTES = 8 << 20  # the intermediate files of one compile
_MOST_TEXT_BYTES = 1 << 20  # of a manifest or a note; both are below 10 KB


class DamagedFileError(Exception):
    """A file was looked at and is not what it should be; the text is a clause for people."""


class FileFacts(NamedTuple):
    """What a manifest says of a file."""

    size: int
    sha256: str


def describe_problem(error: OSError) -> str:
    """One clause for people: why a directory cannot be used."""
    if isinstance(error, UntrustedPlaceError):
        return str(error.strerror)
    reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}")
    return f"{reason} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


# Only the errnos above count. A builder's FileNotFoundError, for example, is a missing tool or
# source and not a broken directory.
def is_storage_problem(error: BaseException) -> bool:
    """Whether an exception out of a builder is the directory's fault and not the compiler's."""
    return isinstance(error, OSError) and error.errno in _REASONS


class StoreFiles:
    """Plain local operations. Subclass it to inject faults."""

    def make_dir(self, folder: Place) -> None:
        """Create a directory and its parents; an existing one is fine."""
        with folder.opened(make=True):
            pass

    def names(self, folder: Place) -> list[str]:
        """Sorted names in a directory; [] if it does not exist.

        It lists the directory instead of asking for one name, because an NFS client caches that a
        name is absent and answers `stat` from that cache for seconds after another host's rename.
        """
        try:
            with folder.opened() as descriptor:
                return sorted(os.listdir(descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def publish(self, source: Place, target: Place) -> None:
        """Make a complete directory appear under its final name in one step. OSError where a
        non-empty target exists, or the file system refuses.
        """
        with source.parent.opened() as old, target.parent.opened() as new:
            # Atomic, and refuses a target that is not empty.
            os.rename(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)
            _sync_dir(new)

    def sync_tree(self, folder: Place) -> dict[str, FileFacts]:
        """Flush every file of a tree, so that a power cut cannot publish a hole, and give files and
        directories the modes of the cache. Returns size and checksum of each file by its name.
        DamagedFileError where an entry is neither a regular file nor a directory.
        """
        found = {}
        with folder.opened() as top:
            mode = inherited_mode(os.fstat(top), FILE_BITS)
            for name, handle in _files_below(top):
                set_mode(handle.fileno(), mode)
                os.fsync(handle.fileno())
                found[name] = _facts_of(handle)
        return found

    def sync_dir(self, folder: Place) -> None:
        """Flush a directory's entries where the file system can."""
        with folder.opened() as descriptor:
            _sync_dir(descriptor)

    @contextmanager
    def reading(self, folder: Place, name: str) -> Iterator[BufferedReader]:
        """A regular file below `folder`; `name` may have several components. DamagedFileError where
        it is absent or no regular file, or the name leads elsewhere; OSError where the file system
        does not answer, or somebody else could have written it.
        """
        parts = _parts_of(name)
        for part in parts[:-1]:
            folder = folder / part
        try:
            with folder.opened() as descriptor, _opened_file(descriptor, parts[-1]) as handle:
                status = os.fstat(handle.fileno())
                folder.judge_file(status, parts[-1], os.fstat(descriptor))
                yield handle
        except FileNotFoundError:
            raise DamagedFileError("is missing") from None
        except NotADirectoryError:
            raise DamagedFileError("is not in a directory") from None

    def check(self, folder: Place, name: str, wanted: FileFacts) -> None:
        """Compare a file with what a manifest says of it. Errors as `reading`.

        Size first and checksum second: a truncated file, the usual damage, is found without reading
        it.
        """
        with self.reading(folder, name) as handle:
            size = os.fstat(handle.fileno()).st_size
            if size != wanted.size:
                raise DamagedFileError(f"has {size} bytes instead of {wanted.size}")
            if hashlib.file_digest(handle, "sha256").hexdigest() != wanted.sha256:
                raise DamagedFileError("does not match its checksum")

    def write_text(self, file: Place, text: str) -> None:
        """Write and flush a small file in place. A reader may see it torn: see `read_json`."""
        with file.parent.opened() as folder:
            descriptor = _open_for_writing(folder, file.name)
            with os.fdopen(descriptor, "wb") as handle:
                handle.truncate(0)
                handle.write(text.encode())
                handle.flush()
                os.fsync(descriptor)

    def read_text(self, folder: Place, name: str) -> str:
        """The text of a small file. Errors as `reading`."""
        with self.reading(folder, name) as handle:
            content = handle.read(_MOST_TEXT_BYTES + 1)
        if len(content) > _MOST_TEXT_BYTES:
            raise DamagedFileError(f"has more than {_MOST_TEXT_BYTES} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise DamagedFileError("is not UTF-8 text") from None

    def read_json(self, file: Place) -> Any:
        """The parsed content, or None if it is absent, unreadable or torn."""
        try:
            return parse_json(self.read_text(file.parent, file.name))
        except (OSError, DamagedFileError):
            return None

    def remove_tree(self, folder: Place) -> None:
        """Delete a tree as far as possible; what cannot be deleted stays."""
        try:
            with folder.parent.opened() as descriptor:
                shutil.rmtree(folder.name, ignore_errors=True, dir_fd=descriptor)
        except OSError:
            return

    def probe(self, folder: Place) -> None:
        """Raise the OSError that a compile into `folder` would meet, if any."""
        with folder.opened() as descriptor:
            room = os.statvfs(descriptor)
            # Some network file systems do not count and report no blocks at all.
            if room.f_blocks and room.f_bavail * room.f_frsize < _LEAST_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # A quota does not show in the free space. The size is larger than a block and a typical
            # inline file, so a full file system cannot hide in metadata, and the flush forces
            # delayed allocation to happen now.
            name = f".probe-{secrets.token_hex(8)}"
            with os.fdopen(_open_for_writing(descriptor, name), "wb") as handle:
                os.unlink(name, dir_fd=descriptor)  # first, so that a kill leaves nothing behind
                handle.write(b"\0" * _PROBE_BYTES)
                handle.flush()
                os.fsync(handle.fileno())


def parse_json(text: str) -> Any:
    """Parsed JSON. DamagedFileError where it is none."""
    try:
        return json.loads(text)
    # The parser recurses, so a deeply nested text ends it with this error.
    except (ValueError, RecursionError):
        raise DamagedFileError("is not readable JSON") from None


def _files_below(folder: int, prefix: str = "") -> Iterator[tuple[str, BufferedReader]]:
    """Every file of a tree, open, with its relative name. `os.fwalk` would leave out an entry whose
    kind it cannot find out, and so publish an incomplete artefact.
    """
    mode = inherited_mode(os.fstat(folder), DIRECTORY_BITS)
    for name in sorted(os.listdir(folder)):
        try:
            inner = os.open(name, DIRECTORY, dir_fd=folder)
        except NotADirectoryError:
            with _opened_file(folder, name) as handle:
                yield prefix + name, handle
            continue
        try:
            set_mode(inner, mode)
            yield from _files_below(inner, f"{prefix}{name}/")
            _sync_dir(inner)
        finally:
            os.close(inner)


@contextmanager
def _opened_file(folder: int, name: str) -> Iterator[BufferedReader]:
    """A regular file of an open directory. The descriptor decides that it is one, because the name
    may stand for something else a moment later.
    """
    try:
        descriptor = os.open(name, _READ, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise DamagedFileError("is not a regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedFileError("is not a regular file")
        handle = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with handle:
        yield handle


def _open_for_writing(folder: int, name: str) -> int:
    """A regular file with one name in an open directory, made if needed. Anything else of that name
    is removed first, and so is a file that this user may not write.
    """
    mode = inherited_mode(os.fstat(folder), FILE_BITS)
    try:
        descriptor = os.open(name, _WRITE, mode, dir_fd=folder)
        if _is_ours(descriptor, mode):
            return descriptor
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO, errno.EACCES}:
            raise
    else:
        os.close(descriptor)
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    descriptor = os.open(name, _WRITE | os.O_EXCL, mode, dir_fd=folder)
    if not _is_ours(descriptor, mode):
        raise OSError(errno.EEXIST, "another process put a file in the way")
    return descriptor


def _is_ours(descriptor: int, mode: int) -> bool:
    """Whether an open file is regular and has one name; then it gets the mode. A second name would
    be a file of somebody else that was linked here to be overwritten.
    """
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return False
        if status.st_uid == os.geteuid():
            set_mode(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return True


def _sync_dir(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems have no fsync for directories
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise


def _facts_of(handle: BufferedReader) -> FileFacts:
    digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return FileFacts(os.fstat(handle.fileno()).st_size, digest)


def _parts_of(name: str) -> list[str]:
    """The components of a relative name out of a manifest. DamagedFileError where it leads out of
    its directory, or cannot be one.
    """
    parts = name.split("/")
    plain = all(part not in {"", ".", ".."} and "\0" not in part for part in parts)
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        plain = False
    if not plain:
        raise DamagedFileError("is not a name inside the artefact")
    return parts
