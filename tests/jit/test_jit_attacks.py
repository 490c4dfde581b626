"""Swaps at every moment, and mutated manifests. Both seeded; test_jit_faults.py has kills."""

import json
import os
import random
import shutil

import pytest
from damage import TEXT_KINDS, variants
from forks import needs_root
from racer import FakeCompiler, load, make_key
from racers import Field
from system_calls import ActingCalls, SystemCalls

from sonicmoe.errors import SonicMoEError
from sonicmoe.jit import CompileCache

SEED = 20261122
STRANGER = 54321
SWAPS, MUTATIONS = 40, 300
KEY = make_key()


def cache_of(field):
    return CompileCache(field.root, field.local, lock_timeout_s=2)


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
