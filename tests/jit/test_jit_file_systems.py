"""Read-only, full and network-like file systems: real mounts where permitted, and injected faults
everywhere.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time

import pytest
from racer import load, make_key

from sonicmoe.jit import CompileCache
from sonicmoe.jit import files as files_module
from sonicmoe.jit import reader as reader_module

PROCESSES = 8
needs_mounts = pytest.mark.usefixtures("mounts")


def read_only(folder):
    return f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"


def small(folder, kib):
    folder.mkdir(exist_ok=True)
    return f"mount -t tmpfs -o size={kib}k,mode=755 none {folder}"


# Real mounts


@needs_mounts
def test_read_only_miss_is_explained_and_goes_to_the_node(field):
    field.run(size=1)
    mounted = read_only(field.root)
    results = field.race([{"size": 2, "seconds": 0.2, "mounts": mounted} for _ in range(PROCESSES)])
    assert all(result["path"].startswith(str(field.local)) for result in results)
    assert field.builds() == {1: 1, 2: 1}, "the processes of a node share its fallback"
    explained = [result["log"] for result in results if result["log"]]
    assert explained, "by one of those that are there at the same time"
    for log in explained:
        assert "Read-only file system (EROFS)" in log and "SONIC_MOE_CACHE_DIR" in log
    for size, place in ((1, field.root), (2, field.local)):
        again = field.run(size=size, mounts=mounted)
        assert again["bytes"] == 4096 and again["log"] == "", "what is there works in silence"
        assert again["path"].startswith(str(place))


@needs_mounts
def test_nowhere_to_write_is_one_clear_error(field):
    field.root.mkdir()
    field.local.mkdir(mode=0o700)
    setup = f"{read_only(field.root)} && {read_only(field.local)}"
    result = field.run(mounts=setup)
    assert result["error"] == "CacheUnwritableError"
    places = (str(make_key()), str(field.root), str(field.local))
    for part in (*places, "EROFS", "sonicmoe warmup", "SONIC_MOE_LOCAL_CACHE_DIR"):
        assert part in result["message"]


@pytest.mark.parametrize("own_words", [False, True])
@needs_mounts
def test_disk_that_fills_up_in_a_compile_goes_to_the_node(field, own_words):
    """`own_words`: the compiler meets the full disk and reports an error that says nothing of it."""
    mounted = small(field.root, 9 << 10)
    result = field.run(mounts=mounted, count=10 << 20, own_words=own_words)
    assert result["bytes"] == 10 << 20 and result["path"].startswith(str(field.local))
    assert "No space left on device (ENOSPC)" in result["log"]
    assert field.builds() == {1: 2}


# Injected faults


def test_rename_visible_late_is_waited_for(cache, field, key, compiler, monkeypatch):
    """A host sees an artefact of another one late, although it already holds the lock."""
    monkeypatch.setattr(reader_module, "VISIBILITY_TIMEOUT_S", 10.0)
    names, shows_at = files_module.names, time.monotonic() + 0.5

    def late_names(folder):
        shown = time.monotonic() >= shows_at
        return [name for name in names(folder) if shown or name != key.digest]

    monkeypatch.setattr(files_module, "names", late_names)
    for host in ("the publisher", "another"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        shows_at = time.monotonic() + 0.5
        assert load(cache.build(key, compiler(key))) == 4096
        assert time.monotonic() >= shows_at, "the rename did not show before"
    assert field.builds() == {1: 1}


def publish_first(field, key, compiler):
    """A compiler during whose work another process, whose lock was lost, publishes the same key."""

    def build(folder):
        compiler(key)(folder)
        rival = CompileCache(field.folder / "rival", field.local).build(key, compiler(key))
        target = field.root / "artefacts" / "fake" / key.digest
        target.parent.mkdir(parents=True, exist_ok=True)
        manifest = json.loads((rival.path / "manifest.json").read_text())
        manifest["built"]["host"] = "winner"
        (rival.path / "manifest.json").write_text(json.dumps(manifest))
        rival.path.rename(target)

    return build


@pytest.mark.parametrize("swept", [False, True])
def test_loser_of_a_race_uses_the_winners_artefact(cache, field, key, compiler, swept):
    """swept: this process's lock was lost (a network lease ran out), and the next holder removed our
    directory.
    """

    def build(folder):
        publish_first(field, key, compiler)(folder)
        if swept:
            shutil.rmtree(folder)

    artefact = cache.build(key, build)
    assert artefact.manifest["built"]["host"] == "winner" and load(artefact) == 4096
    assert list((field.root / "staging").iterdir()) == []


def test_rename_that_worked_and_reports_an_error(cache, field, key, compiler, monkeypatch):
    """A repeated network request: the first one did it, the answer to the second says that the
    source is gone.
    """

    publish = files_module.publish

    def repeating(source, target):
        publish(source, target)
        if target.name == key.digest:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(source))

    monkeypatch.setattr(files_module, "publish", repeating)
    artefact = cache.build(key, compiler(key))
    assert artefact.path.is_relative_to(field.root) and load(artefact) == 4096


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks_still_publishes(
    field, key, compiler, number, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    cache = CompileCache(field.root, field.local)
    assert load(cache.build(key, compiler(key))) == 4096
    assert "no file locks" in caplog.text
