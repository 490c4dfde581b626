"""Several users on one cache: what a group can repair, and what a stranger cannot do."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forks import User, end, needs_root, run_as, start
from racer import FakeCompiler, load, make_key
from racers import Field

from sonicmoe.jit import CompileCache
from sonicmoe.jit import child as child_module

pytestmark = needs_root

GROUP = 30_000
UMASKS = [0o022, 0o077]
KEY = make_key()
ATTEMPTS = 60
NO_LOG = Path(os.devnull)


@pytest.fixture
def field(tmp_path):
    """A field that other users can reach, which pytest's own directories are not."""
    rehearse(Field(tmp_path))
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield Field(folder)
    shutil.rmtree(folder)


def rehearse(field):
    """Import what the children need: another user may not be able to read the standard library."""
    os.truncate(Path(build(field), "kernel.so"), 1000)
    build(field)
    field.root.chmod(0o777)
    build(field)


def member(number, umask):
    return User(30_000 + number, (30_100 + number, GROUP), umask)


def group_cache(field):
    """As docs/security.md says."""
    field.root.mkdir()
    os.chown(field.root, 0, GROUP)
    field.root.chmod(0o2770)


def cache_of(field):
    local = field.folder / f"local-{os.geteuid()}"
    return CompileCache(field.root, local, lock_timeout_s=2, visibility_timeout_s=0.1)


def build(field, key=KEY):
    artefact = cache_of(field).build(key, FakeCompiler(key, NO_LOG))
    assert load(artefact) == 4096
    return str(artefact.path)


def only_shared(field):
    """The cache directory alone: a problem of it is an error here."""
    store = cache_of(field)._shared
    return str(store.build(KEY, FakeCompiler(KEY, NO_LOG)).path)


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_a_group_shares_what_its_members_build(field, umask):
    group_cache(field)
    one, two = member(1, umask), member(2, umask)
    path = run_as(one, lambda: build(field))
    assert path.startswith(str(field.root))
    assert run_as(two, lambda: build(field)) == path
    status = Path(path, "kernel.so").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (30_001, GROUP, 0o660)


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_a_member_repairs_what_another_one_built(field, umask):
    group_cache(field)
    one, two = member(1, umask), member(2, umask)
    path = Path(run_as(one, lambda: build(field)), "kernel.so")
    for number in range(5):  # more often than quarantine keeps copies
        os.truncate(path, 1000)
        found = run_as(two if number % 2 == 0 else one, lambda: only_shared(field))
        assert found == str(path.parent)
    assert path.stat().st_uid == 30_002 and path.stat().st_size == 4096
    assert len(list((field.root / "quarantine").iterdir())) == 3


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_a_member_removes_what_a_killed_build_of_another_left(field, umask):
    group_cache(field)
    one, two = member(1, umask), member(2, umask)

    def stuck(folder):
        scratch = folder / ".scratch"
        scratch.mkdir()
        # A real build, whose compiler makes intermediate files and directories of its own.
        script = field.folder / "compiler.py"
        child_module.run_build_script("fake", script, {"build_directory": str(scratch)}, {})

    def begin():
        cache_of(field)._shared.build(KEY, stuck)

    # The interpreter may be out of reach for another user, so a shell plays the compiler.
    (field.folder / "compiler.py").write_text(
        'mkdir "${1%/*}/deep" && > "${1%/*}/deep/x.o" && kill -9 $PPID'
    )
    script = field.folder / "sh"
    script.write_text('#!/bin/sh\nshift; exec /bin/sh "$@"\n')
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_module.sys, "executable", str(script))
        child = start(begin, one)
        os.waitpid(child, 0)
    (left,) = (field.root / "staging").iterdir()
    assert (left / ".scratch" / "deep" / "x.o").exists()
    run_as(two, lambda: only_shared(field))
    assert list((field.root / "staging").iterdir()) == []


def test_old_staging_of_kernels_that_nobody_builds_any_more_is_removed(field):
    group_cache(field)
    one, two = member(1, 0o022), member(2, 0o022)
    keys = [make_key(size) for size in range(2, 8)]

    def hang(folder):
        (folder / "half").write_bytes(b"half")
        os.kill(os.getpid(), 9)

    for key in keys:
        os.waitpid(start(lambda key=key: cache_of(field)._shared.build(key, hang), one), 0)
    left = sorted((field.root / "staging").iterdir())
    assert len(left) == len(keys)
    for path in left[:4]:
        os.utime(path, (1, 1))
    # One of the old ones has a builder, which waits for its compiler.
    alive = left[0].name.split(".")[0]
    holder = start(lambda: hold(field.root / "locks" / f"{alive}.lock"), one)
    try:
        Field.until((field.root / "held").exists)
        run_as(two, lambda: only_shared(field))
    finally:
        end(holder)
    assert sorted((field.root / "staging").iterdir()) == [left[0], *left[4:]]


def hold(lock):
    with open(lock, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        (lock.parents[1] / "held").touch()
        time.sleep(60)


@pytest.mark.parametrize("mode", [0o755, 0o700], ids=oct)
def test_others_use_what_they_can_read_and_build_the_rest_for_themselves(field, mode):
    owner, other = User(30_001, (30_101,), 0o777 & ~mode), User(30_002, (30_102,))
    field.folder.chmod(0o1777)
    field.root.mkdir()
    os.chown(field.root, 30_001, 30_101)
    field.root.chmod(mode)
    field.folder.chmod(0o755)  # only an administrator makes names here
    (field.folder / "local-30002").mkdir(mode=0o700)
    os.chown(field.folder / "local-30002", 30_002, 30_102)
    path = run_as(owner, lambda: build(field))
    assert path.startswith(str(field.root))
    found = run_as(other, lambda: build(field))
    assert found.startswith(str(field.root) if mode == 0o755 else str(field.folder / "local-30002"))
    own = run_as(other, lambda: build(field, make_key(2)))
    assert own.startswith(str(field.folder / "local-30002"))
    assert sorted(path.name for path in field.root.iterdir()) == ["artefacts", "locks", "staging"]


def evil_cache(folder):
    """A valid cache whose kernel is the attacker's."""
    store = CompileCache(folder / "evil", folder / "unused")

    def evil(target):
        (target / "kernel.so").write_bytes(b"evil")

    store.build(KEY, evil)
    return folder / "evil"


class Stranger:
    """Makes, links, swaps and removes the victim's directory without end."""

    def __init__(self, field):
        self.field, self.target = field, field.folder / "local"
        self.home = field.folder / "home"
        self.innocent = field.folder / "innocent"
        (self.innocent / "rebuilt-here").mkdir(mode=0o700, parents=True)

    def flip(self, evil):
        """Let a link lead to a directory of the victim's, which passes every check, and to the
        attacker's, so that a check and a use by name may see different ones.
        """
        for number in range(60):
            link = self.field.folder / "link"
            link.symlink_to(evil if number % 2 else self.innocent)
            link.rename(self.target)
            time.sleep(0.001)

    def squat(self, evil):
        target = self.target
        for make in (
            lambda: shutil.copytree(evil, target),
            lambda: target.mkdir(0o777),
            lambda: os.mkfifo(target),
        ):
            make()
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    def attack(self):
        self.home.mkdir()
        evil = evil_cache(self.home)
        (evil / "rebuilt-here").mkdir()
        shutil.copytree(evil / "artefacts", evil / "rebuilt-here" / "artefacts")
        (self.home / "ready").touch()
        while True:
            for trick in (self.flip, self.squat):
                with suppress(OSError):
                    self.target.unlink(missing_ok=True)
                with suppress(OSError):
                    trick(evil)


def test_a_stranger_in_the_temporary_directory_gains_nothing(field):
    """While the victim publishes and loads: the node's directory lies where every user can make
    names, as in /tmp.
    """
    field.folder.chmod(0o1777)
    stranger = Stranger(field)
    ran, outcomes = [], {"loaded": 0, "refused": 0}

    def loader(artefact):
        content = artefact.file("kernel.so").read_bytes()
        ran.append(content)
        if artefact.path.is_relative_to(field.root):
            raise OSError("does not load here")
        return content

    attacker = start(stranger.attack, User(30_009, (30_009,)))
    try:
        Field.until((stranger.home / "ready").exists)
        for attempt in range(ATTEMPTS):
            root = field.root if attempt % 4 else Path("/proc/1/mem")
            cache = CompileCache(
                root, stranger.target, lock_timeout_s=2, visibility_timeout_s=0, host="here"
            )
            try:
                cache.get(KEY, FakeCompiler(KEY, field.log), loader)
                outcomes["loaded"] += 1
            except Exception as error:
                assert type(error).__name__ in {"CacheUnwritableError", "ArtefactLoadError"}, error
                outcomes["refused"] += 1
            with suppress(FileNotFoundError):  # the attacker moves it away at any moment
                if stranger.target.lstat().st_uid == 0:
                    shutil.rmtree(stranger.target)
    finally:
        end(attacker)
    assert ran.count(b"evil") == 0, "the attacker's code ran"
    assert outcomes["refused"] > 0, "the attacker never got in the way"
