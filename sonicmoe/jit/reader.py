"""Reading one directory of published artefacts: without a lock and without writing."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from . import files
from .files import DamagedFileError, describe_problem
from .key import CompileKey
from .manifest import Artefact, verify
from .place import Place, Trust, UntrustedPlaceError

# Longest wait for a publication that another host reports, and the pauses in it, seconds.
VISIBILITY_TIMEOUT_S = 10.0
_FIRST_RECHECK_S, _LONGEST_RECHECK_S = 0.01, 0.5
# Answers of a network file system or a busy machine that the next moment may change.
_MAY_PASS = {
    errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT,
}  # fmt: skip
_PAUSES_S = (0.01, 0.05)  # between the attempts of one look


@dataclass(frozen=True)
class Lookup:
    """The outcome of a lock-free look at the store: an artefact, or why there is none.

    Attributes:
        damaged: one was read and found damaged, so it has to go before another can be published.
        unreadable: the directory could not be read, or is refused. It may hold an intact artefact,
            so nothing there is touched.
    """

    artefact: Artefact | None
    reason: str
    damaged: bool = False
    unreadable: bool = False


class ArtefactReader:
    """Looks artefacts up and verifies them.

    Readers take no lock. They see either nothing or a complete artefact, because one rename
    publishes it.
    """

    def __init__(self, root: Path, trust: Trust) -> None:
        """A reader of `root`, which need not exist. Arguments as for `ArtefactStore`."""
        self.root, self.place = root, Place.of(root, trust)

    def place_of(self, key: CompileKey) -> Place:
        """Where the artefact of a key lies once published."""
        return self.place / "artefacts" / key.kernel / key.digest

    def lookup(self, key: CompileKey) -> Lookup:
        """Look without a lock and without writing. Never raises."""
        for pause in (*_PAUSES_S, None):
            try:
                return self._lookup(key)
            except UntrustedPlaceError as error:
                return Lookup(None, describe_problem(error), unreadable=True)
            except OSError as error:
                if pause is None or error.errno not in _MAY_PASS:
                    reason = f"{self.root} cannot be read: {describe_problem(error)}"
                    return Lookup(None, reason, unreadable=True)
                time.sleep(pause)
            # A null byte in the configured path raises ValueError, and no list of types would be
            # complete.
            except Exception as error:  # whatever is wrong with a cache, it is a miss
                return Lookup(None, f"{self.root} cannot be read: {error}", unreadable=True)
        raise AssertionError("the last attempt returns")

    def await_visible(self, key: CompileKey) -> Lookup:
        """Look again until the artefact is visible, or for `VISIBILITY_TIMEOUT_S`."""
        # Nothing reports when another host's rename becomes visible here, so this polls. The delay
        # doubles, because most artefacts appear at once and the others after seconds of client
        # cache.
        deadline, delay = time.monotonic() + VISIBILITY_TIMEOUT_S, _FIRST_RECHECK_S
        while True:
            found = self.lookup(key)
            # A damaged artefact ends the wait as well: it is visible, and waiting does not repair
            # it.
            if found.artefact is not None or found.damaged or time.monotonic() >= deadline:
                return found
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_RECHECK_S)

    def copy(self, artefact: Artefact, folder: Path) -> None:
        """Copy the files of an artefact of this store, as a builder of another. DamagedFileError
        where a file is not what the manifest says; OSError where one cannot be read or written.
        """
        source = self.place_of(artefact.key)
        # The manifest itself is not listed and not copied, because the publication writes one for
        # the new directory.
        for name, facts in artefact.manifest["files"].items():
            target = folder / name
            with files.reading(source, name) as handle, open(target, "xb") as copy:
                shutil.copyfileobj(handle, copy)
            # The new manifest will describe the copy, so a copy that differs must not get that far.
            with open(target, "rb") as copy:
                if hashlib.file_digest(copy, "sha256").hexdigest() != facts["sha256"]:
                    raise DamagedFileError(f"{name!r} changed while it was copied")

    def _lookup(self, key: CompileKey) -> Lookup:
        folder = self.place / "artefacts" / key.kernel
        names = files.names(folder)
        # A machine without the compiler cannot name a toolchain, and takes an artefact of any.
        if key.toolchain is None:
            # `names` is sorted, so this order is fixed: hosts that see the same directory try the
            # same artefacts in the same order.
            candidates = [name for name in reversed(names) if name.startswith(f"{key.family}-")]
        else:
            candidates = [name for name in names if name == key.digest]
        reason, unread = f"no artefact in {folder}", None
        for name in candidates:
            # A lookup without a toolchain may find several artefacts. A damaged or unreadable one
            # does not hide an intact one behind it.
            try:
                return Lookup(verify(key, folder / name), "")
            except DamagedFileError as damage:
                reason = f"the artefact {folder / name} is damaged: {damage}"
            except OSError as error:
                unread = error
        if unread is not None:
            raise unread
        return Lookup(None, reason, damaged=bool(candidates))
