"""Directories that hold code, used only where the right people can write.

An artefact is machine code that this process loads and runs, so everybody who can write to its
directory, or can replace a directory above it, can run code as this user. `Place.checked` therefore
walks from `/` to the directory, and judges owner and mode of every component, and of every link on
the way, before it looks at the next one.

A component that passed lies in a directory that passed before it, so nobody outside the rule can
put another one in its place: under a sticky bit only the owner of an entry can. A checked path
therefore stays what it was, and may be given to a compiler or to `dlopen`.
"""

from __future__ import annotations

import errno
import functools
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

# The bits that new entries take over from their directory.
DIRECTORY_BITS, FILE_BITS = 0o2775, 0o664
_MOST_LINKS = 40  # as many as Linux follows in one path
# The depth of a component above the cache, and of the cache's own directory.
_OUTSIDE, _ROOT = -1, 0


class Trust(Enum):
    """Who may be able to write to a cache directory.

    OWNER: this user and root. Nobody else may write to it or to a directory above it.
    SHARED: the people whom owner and group name, because somebody set both up for this cache. What
    every user can write is refused, and so is what a stranger made while every user could.
    ANYBODY: everybody. The user has said so with SONIC_MOE_TRUST_CACHE=1.
    """

    OWNER = "owner"
    SHARED = "shared"
    ANYBODY = "anybody"


def shared_trust(trusted: bool) -> Trust:
    """The rule for the cache directory under a value of SONIC_MOE_TRUST_CACHE."""
    return Trust.ANYBODY if trusted else Trust.SHARED


class UntrustedPlaceError(PermissionError):
    """A directory or file that somebody else could have planted; the text is one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(errno.EPERM, sentence)


@dataclass(frozen=True)
class Place:
    """A file or directory of a cache, and the rule for who may be able to write there.

    Attributes:
        path: the absolute path.
        trust: the rule.
        depth: how many components `path` lies below the directory of the cache.
    """

    path: Path
    trust: Trust
    depth: int = 0

    @classmethod
    def of(cls, root: Path, trust: Trust) -> Place:
        """The directory of a cache."""
        return cls(root.absolute(), trust)

    def __truediv__(self, name: str) -> Place:
        return Place(self.path / name, self.trust, self.depth + 1)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> Place:
        return Place(self.path.parent, self.trust, self.depth - 1)

    def checked(self, *, make: bool = False) -> Path:
        """The path of this directory without links; `make` creates it and its parents.
        UntrustedPlaceError where somebody could have planted it, OSError where it is absent, no
        directory, or cannot be made.
        """
        root = len(self.path.parts) - 1 - self.depth
        here, links = Path(os.sep), iter(range(_MOST_LINKS))
        for index, name in enumerate(self.path.parts):
            here = self._reached(here, name, max(index - root, _OUTSIDE), links, make=make)
        return here

    def _reached(
        self, here: Path, name: str, depth: int, links: Iterator[int], *, make: bool
    ) -> Path:
        """One component further than `here`, which is free of links; `links`: how many may come."""
        entry = here.parent if name == os.pardir else here / name
        above = os.lstat(entry.parent)
        status = self._status_of(entry, above, depth, make=make)
        if not stat.S_ISLNK(status.st_mode):
            self._judge_directory(entry, above, depth)
            return entry
        # The cache makes no links, and one that leads out of it would escape the rule for `inside`.
        if depth > _ROOT:
            raise UntrustedPlaceError(
                f"{entry} is a symbolic link, and the cache follows none below its own directory"
            )
        # The mode of a link says nothing; its owner says who decides where it leads.
        anybody_makes = bool(above.st_mode & stat.S_IWOTH)
        _judge(self.trust, status, entry, inside=False, anybody_makes=anybody_makes, link=True)
        if next(links, None) is None:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(entry))
        *before, last = Path(os.readlink(entry)).parts
        for part in before:
            here = self._reached(here, part, _OUTSIDE, links, make=make)
        return self._reached(here, last, depth, links, make=make)

    def judge_file(self, status: os.stat_result, name: str, folder: os.stat_result) -> None:
        """Refuse a file of this directory, whose own status is `folder`, that people outside the
        rule made or can write. UntrustedPlaceError is the refusal.
        """
        _judge_maker(self.trust, status, self.path / name, folder)
        _judge(self.trust, status, self.path / name, inside=True, anybody_makes=False)

    def _status_of(
        self, entry: Path, above: os.stat_result, depth: int, *, make: bool
    ) -> os.stat_result:
        try:
            return os.lstat(entry)
        except FileNotFoundError:
            if not make:
                raise
        outside = 0o700 if self.trust is Trust.OWNER else 0o775
        mode = inherited_mode(above, DIRECTORY_BITS) if depth > _ROOT else outside
        with suppress(FileExistsError):  # another process was faster, and its directory is judged
            os.mkdir(entry, mode)
            if depth > _ROOT:
                set_mode(entry, mode)
        return os.lstat(entry)

    def _judge_directory(self, entry: Path, above: os.stat_result, depth: int) -> None:
        # Through the dot, because a directory that is mounted when it is entered shows its own
        # owner and mode only then.
        status = os.stat(f"{entry}{os.sep}.")
        if depth > _ROOT:
            _judge_maker(self.trust, status, entry, above)
        anybody_makes = bool(above.st_mode & stat.S_IWOTH)
        _judge(self.trust, status, entry, inside=depth >= _ROOT, anybody_makes=anybody_makes)


def refusal(root: Path, trust: Trust) -> str:
    """Why a cache directory is refused, or "". For `doctor`; creates nothing."""
    try:
        Place.of(root, trust).checked()
    except UntrustedPlaceError as error:
        return str(error.strerror)
    except (OSError, ValueError):
        pass  # absent or unreadable, which is another finding
    return ""


def _judge(
    trust: Trust,
    status: os.stat_result,
    path: Path,
    *,
    inside: bool,
    anybody_makes: bool,
    link: bool = False,
) -> None:
    """Refuse one file, link or directory by owner and mode.

    `inside`: it is the cache's directory or lies below it. `anybody_makes`: every user can create
    names in the directory above it.
    """
    if trust is Trust.ANYBODY:
        return
    owner, mode = status.st_uid, status.st_mode
    mine = owner in {os.geteuid(), 0}
    # In a container with a user namespace of its own, the host's root has no number and appears as
    # this one. Such a directory is taken for root's where only an administrator can have made it.
    if not inside and not anybody_makes and owner == _unmapped_user():
        mine = True
    if not mine and anybody_makes:
        raise UntrustedPlaceError(
            f"{path} belongs to {_user(owner)} and lies in {path.parent}, where every user could "
            f"have made it; {_REMEDIES[trust]}"
        )
    if not mine and trust is Trust.OWNER:
        raise UntrustedPlaceError(
            f"{path} belongs to {_user(owner)}, who could put code there; {_REMEDIES[trust]}"
        )
    if link:
        return
    # The sticky bit of /tmp keeps users from replacing each other's entries. It does not keep them
    # from making entries, so it is no help inside the cache.
    kept_apart = mode & stat.S_ISVTX and not inside
    refused = stat.S_IWOTH if trust is Trust.SHARED else stat.S_IWOTH | stat.S_IWGRP
    if mode & refused and not kept_apart:
        who = "every user" if mode & stat.S_IWOTH else "its group"
        # A mode that is set later says nothing of what lies there already.
        again = _AGAIN if inside else "close it, delete the cache below it and warm up again"
        raise UntrustedPlaceError(
            f"{path} can be written by {who} (mode {stat.S_IMODE(mode):o}), who could put code "
            f"there; {again}, or {_REMEDIES[trust]}"
        )


def _judge_maker(trust: Trust, status: os.stat_result, path: Path, folder: os.stat_result) -> None:
    """Refuse an entry whose owner may not make it: it dates from when the directory was open."""
    if trust is Trust.SHARED and not _may_make(status, folder):
        raise UntrustedPlaceError(
            f"{path} belongs to {_user(status.st_uid)}, who may not write to {path.parent} and could "
            f"have put code there; {_AGAIN}, or {_REMEDIES[trust]}"
        )


def _may_make(status: os.stat_result, folder: os.stat_result) -> bool:
    """Whether the owner of an entry may make names in its directory."""
    if status.st_uid in {os.geteuid(), 0, folder.st_uid}:
        return True
    # A container need not know users by name. Then the entry's own group is all that can be asked.
    groups = _groups(status.st_uid) or (status.st_gid,)
    return bool(folder.st_mode & stat.S_IWGRP) and folder.st_gid in groups


@functools.cache
def _groups(user: int) -> tuple[int, ...]:
    """The groups of a user; () for one that has no name here."""
    try:
        entry = pwd.getpwuid(user)
        return tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    except KeyError:
        return ()


_AGAIN = "delete it and warm up again"
_REMEDIES = {
    Trust.OWNER: "set SONIC_MOE_LOCAL_CACHE_DIR to a directory of this user",
    Trust.SHARED: "set SONIC_MOE_CACHE_DIR to another directory, or SONIC_MOE_TRUST_CACHE=1 if all "
    "users of this machine are trusted",
}


def inherited_mode(parent: os.stat_result, mask: int) -> int:
    """The mode of a new entry: that of its directory within `mask`, and always open to its owner.

    The umask does not count, so that in a directory that a group shares each member can repair and
    remove the artefacts of the others. `mask` is `DIRECTORY_BITS` or `FILE_BITS`.
    """
    return parent.st_mode & mask | (0o700 & mask)


def set_mode(entry: Path | int, mode: int) -> None:
    """Give a file or directory of this user a mode, if it has another one and the file system has
    modes to give. Where it has none, what everybody can write is refused when it is read.
    """
    if stat.S_IMODE(os.stat(entry).st_mode) == mode:
        return
    try:
        os.chmod(entry, mode)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}:
            raise


@functools.cache
def _unmapped_user() -> int:
    """The user id that stands for all without a number in this user namespace, or -1 in none."""
    try:
        ranges = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        if ranges == ["0", "0", "4294967295"]:
            return -1
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
