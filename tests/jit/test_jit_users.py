"""Several users on one cache: what a group can repair, and what a stranger cannot do."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from forks import User, needs_root, run_as
from racer import FakeCompiler, load, make_key
from racers import Field

from sonicmoe.jit import CompileCache

pytestmark = needs_root

GROUP = 30_000
KEY = make_key()
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
    return CompileCache(field.root, local, lock_timeout_s=2)


def build(field, key=KEY):
    artefact = cache_of(field).build(key, FakeCompiler(key, NO_LOG))
    assert load(artefact) == 4096
    return str(artefact.path)


def only_shared(field):
    """The cache directory alone: a problem of it is an error here."""
    store = cache_of(field)._shared
    return str(store.build(KEY, FakeCompiler(KEY, NO_LOG)).path)


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_a_group_shares_and_repairs_what_its_members_build(field, umask):
    group_cache(field)
    one, two = member(1, umask), member(2, umask)
    path = Path(run_as(one, lambda: build(field)), "kernel.so")
    assert path.is_relative_to(field.root)
    assert run_as(two, lambda: build(field)) == str(path.parent)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (30_001, GROUP, 0o660)
    for number in range(5):  # more often than quarantine keeps copies
        os.truncate(path, 1000)
        found = run_as(two if number % 2 == 0 else one, lambda: only_shared(field))
        assert found == str(path.parent)
    assert path.stat().st_uid == 30_002 and path.stat().st_size == 4096
    assert len(list((field.root / "quarantine").iterdir())) == 3


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
