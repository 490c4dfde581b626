"""An error at any one system call of the cache, errors that last, and kills: the kernel is right, or one
clear error comes, and no healthy artefact is lost.
"""

import errno
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from forks import start
from racer import FakeCompiler, load, make_key
from racers import Field
from system_calls import ActingCalls, SystemCalls

from sonicmoe.errors import SonicMoEError
from sonicmoe.jit import Artefact, CompileCache
from sonicmoe.jit import reader as reader_module

TRANSIENT = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM)
LASTING = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOSPC, errno.EROFS)
SEED = 20261122
KILLS = 5  # of each scene
KEY = make_key()


def open_cache(field):
    return CompileCache(field.root, field.local, lock_timeout_s=0.2)


def build(field, calls):
    return open_cache(field).build(KEY, calls.not_counted(FakeCompiler(KEY, field.log)))


def share(field, calls):
    """Warm-up copies an artefact of this node into the cache directory."""
    return open_cache(field).share(KEY) or build(field, calls)


def publish(field):
    open_cache(field).build(KEY, FakeCompiler(KEY, field.log))


def publish_and_damage(field):
    publish(field)
    os.truncate(field.root / "artefacts" / "fake" / KEY.digest / "kernel.so", 1000)


def publish_here(field):
    CompileCache(field.local, field.root).build(KEY, FakeCompiler(KEY, field.log))


def leave_staging(field):
    """Killed builds of this key."""
    publish(field)
    shutil.rmtree(field.root / "artefacts")
    for number in (1, 2):
        left = field.root / "staging" / f"fake-{KEY.digest}.host.{number}"
        (left / ".scratch").mkdir(parents=True)
        (left / ".scratch" / "half.o").write_bytes(b"half")


class Scene(NamedTuple):
    """A field prepared once and copied for each case, and a step of the cache on it."""

    name: str
    prepare: Callable[[Field], object]
    step: Callable[[Field, SystemCalls], Artefact] = build
    healthy: bool = False


SCENES = [
    Scene("empty", lambda field: None),
    Scene("warm", publish, healthy=True),
    Scene("damaged", publish_and_damage),
    Scene("staging", leave_staging),
    Scene("share", publish_here, share),
]


each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)


@pytest.fixture
def fresh(scene, memory):
    """A context with a copy of the scene's field, at a place of its own."""
    original = Field(memory / "original")
    original.folder.mkdir()
    scene.prepare(original)

    @contextmanager
    def copy():
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            shutil.copytree(original.folder, folder, symlinks=True, dirs_exist_ok=True)
            yield Field(Path(folder))

    return copy


def verdict(scene, field, calls):
    """ "served" or "refused"; anything else fails the test."""
    where = f"{scene.name}: call {calls.fails} ({calls.failed}), errno {calls.number}"
    try:
        assert load(step(scene, field, calls)) == 4096, where
        outcome = "served"
    except SonicMoEError as error:
        text = str(error)
        assert "\n" not in text and "fake[H=1" in text, f"{where}: {text}"
        outcome = "refused"
    # The next process, with nothing wrong any more.
    assert load(open_cache(field).build(KEY, FakeCompiler(KEY, field.log))) == 4096, where
    quarantine = field.root / "quarantine"
    if scene.name != "damaged":
        thrown = quarantine.exists() and list(quarantine.iterdir())
        assert not thrown, f"{where}: a healthy artefact was thrown away"
    if scene.healthy:
        kept = open_cache(field).try_load(KEY)
        assert kept is not None and kept.path.is_relative_to(field.root), where
    return outcome


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(reader_module, "_PAUSES_S", (0.0, 0.0))


def step(scene, field, calls):
    with calls.counted():
        return scene.step(field, calls)


def calls_of(scene, fresh):
    calls = SystemCalls()
    with fresh() as field:
        step(scene, field, calls)
    return calls.names


@each_scene
def test_one_failing_call(scene, fresh, pytestconfig):
    """Calls of the scene, each with one of the errors: a sample in the gate, all of them with
    `pytest --attacks 5000`.
    """
    share = min(1.0, pytestconfig.getoption("--attacks") / 5000)
    names = calls_of(scene, fresh)
    chosen = random.Random(SEED)
    outcomes = Counter()
    for fails in sorted(chosen.sample(range(len(names)), round(share * len(names)))):
        calls = SystemCalls(fails, chosen.choice(TRANSIENT))
        with fresh() as field:
            outcomes[verdict(scene, field, calls)] += 1
        assert calls.failed == names[fails], "the scene makes the same calls every time"
    # One error is made good from the other directory.
    assert outcomes["served"] > 0.9 * outcomes.total()


@each_scene
def test_errors_that_last(scene, fresh):
    """From one call on, all calls of its name fail: a disk that fills up, a server that is gone."""
    names = calls_of(scene, fresh)
    if scene.name == "empty":  # injection that reaches nothing would pass every test
        some = "open fstat lstat listdir mkdir rename replace fsync flock statvfs write unlink"
        assert {*names} >= {*some.split(), "readinto"}
    chosen = random.Random(SEED)
    for name in sorted(set(names)):
        first = chosen.choice([index for index, found in enumerate(names) if found == name])
        for number in chosen.sample(LASTING, 2):
            with fresh() as field:
                verdict(scene, field, SystemCalls(first, number, lasting=True))


@each_scene
def test_kills_at_any_moment(scene, fresh):
    """After each kill: what is visible is intact, no lock is left, and the next process gets all."""
    moments = range(len(calls_of(scene, fresh)))
    for number in random.Random(SEED).sample(moments, KILLS):
        end = ActingCalls(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with fresh() as field:
            child = start(lambda field=field, end=end: step(scene, field, end))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            found = open_cache(field).try_load(KEY)
            assert found is None or load(found) == 4096, f"kill {number}"
            artefact = step(scene, field, SystemCalls())
            assert load(artefact) == 4096 and artefact.path.is_relative_to(field.root)
            assert not list((field.root / "staging").iterdir()), f"kill {number}"
