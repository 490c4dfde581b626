"""Swaps at every moment, kills at every moment, and mutated manifests. All seeded."""

import json
import os
import random
import shutil
import signal

import pytest
from damage import TEXT_KINDS, variants
from forks import needs_root, start
from racer import FakeCompiler, load, make_key
from racers import Field
from system_calls import SystemCalls

from sonicmoe.errors import SonicMoEError
from sonicmoe.jit import CompileCache

SEED = 20261122
STRANGER = 54321
SWAPS, KILLS, MUTATIONS = 40, 24, 300
KEY = make_key()


def cache_of(field):
    return CompileCache(field.root, field.local, lock_timeout_s=2)


class ActingCalls(SystemCalls):
    """Does something right before the k-th system call instead of letting it fail."""

    def __init__(self, before, act):
        super().__init__()
        self.before, self.act = before, act

    def pass_or_fail(self, name):
        if self.suspended:
            return
        if len(self.names) == self.before:
            with self.elsewhere():
                self.act()
        self.names.append(name)


class Planted:
    """A node's directory `local` in a directory where everybody makes names: first the victim's,
    and after the swap the attacker's, whose kernels are valid and evil.
    """

    def __init__(self, folder, sticky, first):
        self.field = Field(folder)
        self.link = folder / "open" / "local"
        self.field.local = self.link
        self.link.parent.mkdir()
        self.link.parent.chmod(0o1777 if sticky else 0o777)
        self.sticky, self.ran = sticky, list[bytes]()
        (folder / "innocent").mkdir(mode=0o700)
        (folder / "evil").mkdir(mode=0o700)
        CompileCache(folder / "evil", folder / "unused").build(KEY, self._evil)
        self.field.root.write_text("no cache directory, so that only the node's own is left")
        if first != "nothing":
            self.lead_to(first)

    def lead_to(self, name):
        partial = self.link.with_name("partial")
        partial.symlink_to(self.field.folder / name)
        if self.sticky:
            os.chown(partial, STRANGER, STRANGER, follow_symlinks=False)
        if self.link.is_symlink() or not self.link.exists():
            partial.rename(self.link)
        else:  # the victim's own directory, which a stranger cannot replace under a sticky bit
            partial.unlink()

    def load(self, calls):
        """Use the cache as a victim."""
        with calls.counted():
            try:
                cache_of(self.field).get(KEY, FakeCompiler(KEY, self.field.log), self._loader)
            except SonicMoEError as error:
                assert str(self.link) in str(error)

    def _loader(self, artefact):
        self.ran.append(artefact.file("kernel.so").read_bytes())
        return 0

    @staticmethod
    def _evil(folder):
        (folder / "kernel.so").write_bytes(b"evil")


@pytest.mark.parametrize("first", ["innocent", "nothing"])
@pytest.mark.parametrize("sticky", [False, pytest.param(True, marks=needs_root)])
def test_directory_swapped_at_any_moment(memory, sticky, first):
    """An attacker who is always fast enough: the swap comes before the k-th system call."""
    chosen = random.Random(SEED)
    counting = SystemCalls()
    (memory / "count").mkdir()
    Planted(memory / "count", sticky, first).load(counting)
    moments = range(len(counting.names))
    for number in sorted(chosen.sample(moments, min(SWAPS, len(moments)))):
        folder = memory / f"swap-{number}"
        folder.mkdir()
        planted = Planted(folder, sticky, first)
        planted.load(ActingCalls(number, lambda planted=planted: planted.lead_to("evil")))
        assert planted.ran.count(b"evil") == 0, f"the attacker's code ran: swap {number}"
        shutil.rmtree(folder)


def build_three(field, calls):
    """A build, a repair of a damaged artefact, and a copy into the cache directory."""
    keys = [make_key(size) for size in (1, 2, 3)]
    with calls.counted():
        for key in keys[:2]:
            cache_of(field).build(key, calls.not_counted(FakeCompiler(key, field.log)))
        assert cache_of(field).share(keys[2]) is not None


def prepare_three(field):
    damaged, local = make_key(2), make_key(3)
    path = cache_of(field).build(damaged, FakeCompiler(damaged, field.log)).path
    os.truncate(path / "kernel.so", 1)
    CompileCache(field.local, field.root).build(local, FakeCompiler(local, field.log))


def test_kills_at_any_moment(memory):
    """After each kill: what is visible is intact, no lock is left, and the next process gets all."""
    field, counting = Field(memory), SystemCalls()
    prepare_three(field)
    build_three(field, counting)
    chosen = random.Random(SEED)
    for number in chosen.sample(range(len(counting.names)), KILLS):
        folder = memory / f"kill-{number}"
        folder.mkdir()
        field = Field(folder)
        prepare_three(field)
        end = ActingCalls(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        child = start(lambda field=field, end=end: build_three(field, end))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        cache = cache_of(field)
        for size in (1, 2, 3):
            found = cache.try_load(make_key(size))
            assert found is None or load(found) == 4096, f"kill {number}"
        for size in (1, 2, 3):
            key = make_key(size)
            artefact = cache.share(key) or cache.build(key, FakeCompiler(key, field.log))
            assert load(artefact) == 4096 and artefact.path.is_relative_to(field.root)
        assert not list((field.root / "staging").iterdir()), f"kill {number}"
        shutil.rmtree(folder)


def test_mutated_manifests(memory):
    """Each is a miss or the right kernel, and is repaired by the next build."""
    field = Field(memory)
    cache = cache_of(field)
    path = cache.build(KEY, FakeCompiler(KEY, field.log)).path / "manifest.json"
    one_line = json.dumps(json.loads(path.read_text())).encode()
    misses = 0
    for number, (_, content) in enumerate(variants(one_line, SEED, MUTATIONS, TEXT_KINDS)):
        path.write_bytes(content)
        found = cache.try_load(KEY)
        misses += found is None
        assert found is None or load(found) == 4096, f"mutation {number}: {content!r}"
        repaired = cache.build(KEY, FakeCompiler(KEY, field.log))
        assert repaired.path == path.parent and load(repaired) == 4096, f"mutation {number}"
    assert misses > MUTATIONS // 2
    assert len(list((field.root / "quarantine").iterdir())) == 3
    assert field.builds() == {1: 1 + misses}
