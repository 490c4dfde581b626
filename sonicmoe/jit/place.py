"""Directories that hold code, opened only where the right people can write.

An artefact is machine code that this process loads and runs, so everybody who can write to its
directory, or can replace a directory above it, can run code as this user. `Place.opened` therefore
walks from `/` to the directory one component at a time. It opens each component relative to the
one before, never through a link that it has not looked at, and asks the open descriptor, and not
the name, for owner and mode. A name that changes between the question and the use has no effect,
because only the descriptor is used afterwards.

A path whose every component passed stays what it was: to change it, one has to write to one of the
directories that were judged. So a path that has passed may be given to a compiler or to `dlopen`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

# How directories are opened, and the bits that new entries take over from their directory.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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

    @contextmanager
    def opened(self, *, make: bool = False) -> Iterator[int]:
        """The descriptor of this directory; `make` creates it and its parents. UntrustedPlaceError
        where somebody could have planted it, OSError where it cannot be opened or made.
        """
        walk = _Walk(self.trust, make)
        try:
            yield walk.to(self)
        finally:
            walk.close()

    def judge_file(self, status: os.stat_result, name: str, folder: os.stat_result) -> None:
        """Refuse a file of this directory, whose own status is `folder`, that people outside the
        rule made or can write. UntrustedPlaceError is the refusal.
        """
        _judge_maker(self.trust, status, self.path / name, folder)
        _judge(self.trust, status, self.path / name, inside=True, anybody_makes=False)


def who_can_write(root: Path, trust: Trust) -> tuple[str, str]:
    """Why a cache directory is refused, or ""; and who can write there, a clause, or "" while it
    does not exist. For `doctor`; creates nothing.
    """
    refused = ""
    try:
        with Place.of(root, trust).opened():
            pass
    except UntrustedPlaceError as error:
        refused = str(error.strerror)
    except (OSError, ValueError):
        pass  # absent or unreadable, which is another finding
    try:
        status = root.stat()
    except (OSError, ValueError):
        return refused, ""
    names = ["this user" if status.st_uid == os.geteuid() else _user(status.st_uid)]
    if status.st_mode & stat.S_IWGRP:
        names.append(f"group {_group(status.st_gid)}")
    if status.st_mode & stat.S_IWOTH:
        names.append("every user")
    return refused, f"written by {' and '.join(names)}"


class _Walk:
    """One way from `/` down to a directory. Every directory on it stays open until the end."""

    def __init__(self, trust: Trust, make: bool) -> None:
        self._trust, self._make, self._links = trust, make, 0
        self._trail: list[tuple[int, Path, os.stat_result]] = []

    def to(self, place: Place) -> int:
        """The descriptor of the directory, which lives until `close`."""
        top = len(place.path.parts) - 1 - place.depth
        # Read from the end, so that the components of a link's target can be put on top.
        pending = [
            (name, max(index - top, _OUTSIDE)) for index, name in enumerate(place.path.parts)
        ][::-1]
        while pending:
            pending.extend(self._step(*pending.pop()))
        descriptor, path, _ = self._trail[-1]
        # A directory that may be entered and not read gave a descriptor that only leads on. Nothing
        # below could be listed or flushed through it.
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return descriptor

    def close(self) -> None:
        while self._trail:
            descriptor = self._trail.pop()[0]
            with suppress(OSError):  # Linux frees the number whatever close reports
                os.close(descriptor)

    def _step(self, name: str, depth: int) -> list[tuple[str, int]]:
        """Enter one component. Returns the components that a link stands for, the first one last."""
        if name == os.sep:
            self.close()
            self._enter(os.open(os.sep, DIRECTORY), Path(os.sep), depth)
            return []
        if name == os.pardir:
            # The trail is free of links, so the directory before is the parent.
            if len(self._trail) > 1:
                os.close(self._trail.pop()[0])
            _, path, status = self._trail[-1]
            self._judge(status, path, depth)
            return []
        above, folder, _ = self._trail[-1]
        descriptor, path = self._open(above, name, depth), folder / name
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            try:
                return self._read_link(descriptor, path, depth)
            finally:
                os.close(descriptor)
        self._enter(descriptor, path, depth)
        return []

    def _open(self, above: int, name: str, depth: int) -> int:
        for may_make in (self._make, False):
            try:
                return os.open(name, DIRECTORY, dir_fd=above)
            except FileNotFoundError:
                if not may_make:
                    raise
                self._make_dir(above, name, depth)
            # A link, or a directory that may be entered and not read. `O_PATH` opens both. It comes
            # second, because it does not wake an automounted directory.
            except OSError as error:
                if error.errno not in {errno.ENOTDIR, errno.ELOOP, errno.EACCES}:
                    raise
                return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def _make_dir(self, above: int, name: str, depth: int) -> None:
        outside = 0o700 if self._trust is Trust.OWNER else 0o775
        inside = inherited_mode(self._trail[-1][2], DIRECTORY_BITS)
        mode = inside if depth > _ROOT else outside
        try:
            os.mkdir(name, mode, dir_fd=above)
        except FileExistsError:
            return  # another process was faster, and the next look judges what it made
        if depth > _ROOT:
            descriptor = os.open(name, DIRECTORY, dir_fd=above)
            try:
                set_mode(descriptor, mode)
            finally:
                os.close(descriptor)

    def _read_link(self, descriptor: int, path: Path, depth: int) -> list[tuple[str, int]]:
        self._links += 1
        if self._links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        # The cache makes no links, and one that leads out of it would escape the rule for `inside`.
        if depth > _ROOT:
            raise UntrustedPlaceError(
                f"{path} is a symbolic link, and the cache follows none below its own directory"
            )
        # The mode of a link says nothing; its owner says who decides where it leads.
        self._judge(os.fstat(descriptor), path, _OUTSIDE, link=True)
        names = list(Path(os.readlink("", dir_fd=descriptor)).parts)
        depths = [_OUTSIDE] * (len(names) - 1) + [depth]
        return list(zip(names, depths, strict=True))[::-1]

    def _enter(self, descriptor: int, path: Path, depth: int) -> None:
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            self._judge(status, path, depth)
        except BaseException:
            os.close(descriptor)
            raise
        self._trail.append((descriptor, path, status))

    def _judge(self, status: os.stat_result, path: Path, depth: int, *, link: bool = False) -> None:
        above = self._trail[-1][2].st_mode if self._trail else 0
        if depth > _ROOT:
            _judge_maker(self._trust, status, path, self._trail[-1][2])
        _judge(
            self._trust,
            status,
            path,
            inside=depth >= _ROOT,
            anybody_makes=bool(above & stat.S_IWOTH),
            link=link,
        )


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


def set_mode(descriptor: int, mode: int) -> None:
    """Give an open file or directory of this user a mode, if it has another one and the file system
    has modes to give. Where it has none, what everybody can write is refused when it is read.
    """
    if stat.S_IMODE(os.fstat(descriptor).st_mode) == mode:
        return
    try:
        os.fchmod(descriptor, mode)
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


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
