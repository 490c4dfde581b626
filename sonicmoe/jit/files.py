"""The file system operations of the artefact store.

Every operation checks the directory first, as `Place` prescribes. It follows no link, does not wait
at a FIFO, and reads regular files only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

from .place import (
    FILE_BITS,
    Place,
    UntrustedPlaceError,
    inherited_mode,
    set_mode,
)

# The answers to opening a link, a socket, and a name that no file can have. Other errors say that
# the file system could not answer, which is no verdict on the entry.
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
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
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


def names(folder: Place) -> list[str]:
    """Sorted names in a directory; [] if it does not exist.

    It lists the directory instead of asking for one name, because an NFS client caches that a
    name is absent and answers `stat` from that cache for seconds after another host's rename.
    """
    try:
        return sorted(os.listdir(folder.checked()))
    except (FileNotFoundError, NotADirectoryError):
        return []


def publish(source: Place, target: Place) -> None:
    """Make a complete directory appear under its final name in one step. OSError where a
    non-empty target exists, or the file system refuses.
    """
    old, new = source.parent.checked(), target.parent.checked()
    os.rename(old / source.name, new / target.name)  # atomic; refuses what is not empty
    sync_dir(new)


def sync_files(folder: Place) -> dict[str, FileFacts]:
    """Flush every file of a directory, so that a power cut cannot publish a hole, and give it the mode
    of the cache. Returns size and checksum of each by its name. DamagedFileError where an entry is
    no regular file.
    """
    found, top = {}, folder.checked()
    mode = inherited_mode(os.stat(top), FILE_BITS)
    for name in sorted(os.listdir(top)):
        with _opened_file(top / name) as handle:
            set_mode(handle.fileno(), mode)
            os.fsync(handle.fileno())
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            found[name] = FileFacts(os.fstat(handle.fileno()).st_size, digest)
    return found


def reading(folder: Place, name: str) -> BufferedReader:
    """A regular file in `folder`, open. DamagedFileError where it is absent or no regular file, or the
    name leads elsewhere; OSError where the file system does not answer, or somebody else could have
    written it.
    """
    if not is_plain(name):
        raise DamagedFileError("is not a name inside the artefact")
    try:
        path = folder.checked() / name
        handle = _opened_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFileError("is missing") from None
    try:
        folder.judge_file(os.fstat(handle.fileno()), name, os.stat(path.parent))
    except BaseException:
        handle.close()
        raise
    return handle


def check(folder: Place, name: str, wanted: FileFacts) -> None:
    """Compare a file with what a manifest says of it. Errors as `reading`.

    Size first and checksum second: a truncated file, the usual damage, is found without reading
    it.
    """
    with reading(folder, name) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size != wanted.size:
            raise DamagedFileError(f"has {size} bytes instead of {wanted.size}")
        if hashlib.file_digest(handle, "sha256").hexdigest() != wanted.sha256:
            raise DamagedFileError("does not match its checksum")


def write_text(file: Place, text: str) -> None:
    """Write and flush a small file, which appears complete under its name. Whatever had the
    name before, also a link, is replaced and not written through.
    """
    folder = file.parent.checked()
    partial = folder / f".{file.name}.{secrets.token_hex(4)}"
    try:
        _write_new(partial, text.encode())
        os.replace(partial, folder / file.name)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read_text(folder: Place, name: str) -> str:
    """The text of a small file. Errors as `reading`."""
    with reading(folder, name) as handle:
        content = handle.read(_MOST_TEXT_BYTES + 1)
    if len(content) > _MOST_TEXT_BYTES:
        raise DamagedFileError(f"has more than {_MOST_TEXT_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise DamagedFileError("is not UTF-8 text") from None


def read_json(file: Place) -> Any:
    """The parsed content, or None if it is absent, unreadable or none."""
    try:
        return parse_json(read_text(file.parent, file.name))
    except (OSError, DamagedFileError):
        return None


def remove_tree(folder: Place) -> None:
    """Delete a tree as far as possible; what cannot be deleted stays."""
    with suppress(OSError):
        shutil.rmtree(folder.parent.checked() / folder.name, ignore_errors=True)


def probe(path: Path) -> None:
    """Raise the OSError that a compile into a directory would meet, if any."""
    room = os.statvfs(path)
    # Some network file systems do not count and report no blocks at all.
    if room.f_blocks and room.f_bavail * room.f_frsize < _LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # A quota does not show in the free space. The size is larger than a block and a typical
    # inline file, so a full file system cannot hide in metadata, and the flush forces delayed
    # allocation to happen now.
    trial = path / f".probe-{secrets.token_hex(8)}"
    with os.fdopen(os.open(trial, _NEW, 0o600), "wb") as handle:
        os.unlink(trial)  # first, so that a kill leaves nothing behind
        _write(handle, b"\0" * _PROBE_BYTES)


def parse_json(text: str) -> Any:
    """Parsed JSON. DamagedFileError where it is none."""
    try:
        return json.loads(text)
    # The parser recurses, so a deeply nested text ends it with this error.
    except (ValueError, RecursionError):
        raise DamagedFileError("is not readable JSON") from None


def _opened_file(path: Path) -> BufferedReader:
    """A regular file, open. The descriptor decides that it is one, because the name may stand for
    something else a moment later.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise DamagedFileError("is not a regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedFileError("is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _write_new(path: Path, content: bytes) -> None:
    """Write and flush a file that is not there yet, with the mode of the cache."""
    with os.fdopen(os.open(path, _NEW, 0o600), "wb") as handle:
        set_mode(handle.fileno(), inherited_mode(os.stat(path.parent), FILE_BITS))
        _write(handle, content)


def _write(handle: BufferedWriter, content: bytes) -> None:
    handle.write(content)
    handle.flush()
    os.fsync(handle.fileno())


def sync_dir(folder: Path) -> None:
    """Flush a directory's entries where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems have no fsync for directories
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def is_plain(name: str) -> bool:
    """Whether it is the name of an entry of a directory."""
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return name not in {"", ".", ".."} and not {"/", "\0"} & set(name)
