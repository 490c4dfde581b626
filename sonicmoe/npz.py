"""Reads `.npz` files that somebody else may have written or damaged: plain arrays, or one error.

A file from elsewhere must not run code, exhaust the memory, block, or end the program with an
error of the zip format's making. Numpy only; no framework.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np

from .errors import SonicMoEError, expect
from .host import host_memory

SUFFIX = ".npy"


class NpzError(SonicMoEError, ValueError):
    """A file is missing, or holds something else than named arrays; the text says which."""


class NotNpzError(NpzError):
    """A file is something else, or was cut off."""


def read_npz(
    path: Path, wanted: Callable[[Iterable[str]], Iterable[str]] = lambda names: names
) -> dict[str, np.ndarray]:
    """The arrays of a file by name. NpzError where it cannot be read, is no regular file, is
    damaged, or holds objects that would be unpickled.

    wanted: from the names that the file has to those that are read; the others cost nothing.
    """
    try:
        with _open_regular(path) as file:
            whole = zipfile.is_zipfile(file)
            expect(whole, NotNpzError, "it is no .npz file, or its end is missing")
            with zipfile.ZipFile(file) as archive:
                members = _members(archive)
                chosen = {name: members[name] for name in wanted(members)}
                # A compressed member of a few bytes may announce, and deliver, any size, and so
                # may many members together.
                size = sum(info.file_size for info in chosen.values())
                expect(size <= host_memory(), NpzError, "its arrays are larger than the memory")
                return {name: _read_array(archive, info) for name, info in chosen.items()}
    except NpzError:
        raise
    except OSError as error:
        raise NpzError(error.strerror or str(error)) from None
    except KeyError as error:
        raise NpzError(f"it has no array {error.args[0]!r}") from None
    # Every kind of damage ends in another exception somewhere inside zipfile, zlib, struct, ast or
    # numpy: thousands of damaged files met a dozen kinds, and other versions raise others. None of
    # them is an error of the program, as the file is all that was looked at.
    except Exception as error:
        raise NpzError(f"{type(error).__name__}: {error}") from None


def require_numbers(arrays: dict[str, np.ndarray], integers: Iterable[str] = ()) -> None:
    """Check that arrays hold real numbers, and those named in `integers` whole ones. NpzError names
    the array and its dtype.
    """
    for name, array in arrays.items():
        whole = name in integers
        wanted = "integers" if whole else "numbers"
        expect(
            array.dtype.kind in ("iu" if whole else "iuf"),
            NpzError,
            f"{name} has dtype {array.dtype}; needed: {wanted}",
        )


def _open_regular(path: Path) -> IO[bytes]:
    """Open a regular file. A FIFO would block until somebody writes to it, and a device never
    ends.
    """
    expect("\0" not in str(path), NpzError, "its name has a NUL byte")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Asked of what was opened, which nobody can exchange any more.
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        expect(regular, NpzError, "it is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Members by the name of their array."""
    members = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(SUFFIX)
        expect(
            info.filename.endswith(SUFFIX) and name not in members,
            NpzError,
            f"its member {info.filename!r} is no array, or there twice",
        )
        members[name] = info
    return members


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
        # Only what is read to its end has its checksum compared.
        expect(not member.read(1), NpzError, f"{info.filename!r} is longer than its header says")
    return array
