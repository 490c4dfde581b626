"""What somebody else could have planted, and what only looks damaged. pyproject.toml bounds the time of
what would hang.
"""

import errno
import json
import os
import socket
import stat
from pathlib import Path

import pytest
from forks import needs_root
from racer import load, make_key

from sonicmoe.jit import CompileCache
from sonicmoe.jit.errors import CacheUnwritableError, CompileError

# The node's own directory


@pytest.mark.parametrize("below", ["", "artefacts", "artefacts/fake"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777], ids=oct)
def test_own_directory_that_others_can_write_is_not_used(field, key, compiler, below, mode):
    """Nor is it where they can write to a part of it."""
    CompileCache(field.local, field.folder / "unused").build(key, compiler(key))
    reader = CompileCache(field.root, field.local)
    assert reader.try_load(key) is not None
    (field.local / below).chmod(mode)
    assert reader.try_load(key) is None
    assert CompileCache(field.root, field.local).try_load(key) is None


def test_refused_directory_gives_its_reason(field, key, compiler):
    field.root.write_text("not a directory")
    field.local.mkdir(mode=0o700)
    field.local.chmod(0o770)
    with pytest.raises(CacheUnwritableError) as raised:
        CompileCache(field.root, field.local).build(key, compiler(key))
    # `chmod` alone would leave what was planted before it.
    for part in (f"{field.local} can be written by its group (mode 770)", "delete it and warm up again"):  # fmt: skip
        assert part in str(raised.value)
    assert "EPERM" not in str(raised.value)


# The cache directory


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777], ids=oct)
@pytest.mark.parametrize("part", ["cache", "cache/artefacts", "cache/artefacts/fake"])
def test_cache_that_every_user_can_write_is_not_used(field, key, compiler, caplog, mode, part):
    CompileCache(field.root, field.local).build(key, compiler(key))
    (field.folder / part).chmod(mode)
    cache = CompileCache(field.root, field.local)
    assert cache.try_load(key) is None
    assert cache.build(key, compiler(key)).path.is_relative_to(field.local)
    assert cache.build(make_key(2), compiler(make_key(2))).path.is_relative_to(field.local)
    sentence = f"{field.folder / part} can be written by every user (mode {mode:o})"
    assert caplog.text.count(sentence) == 1 and "SONIC_MOE_TRUST_CACHE=1" in caplog.text
    trusting = CompileCache(field.root, field.local, trusted=True).try_load(key)
    assert trusting is not None and trusting.path.is_relative_to(field.root)


@needs_root
@pytest.mark.parametrize("part", ["", "/kernel.so", "/manifest.json"])
def test_what_a_stranger_planted_does_not_run_after_chmod(field, key, compiler, caplog, part):
    planted = CompileCache(field.root, field.local).build(key, compiler(key)).path
    os.chown(f"{planted}{part}", 54321, 54321)
    cache = CompileCache(field.root, field.local)
    assert cache.try_load(key) is None
    assert cache.build(key, compiler(key)).path.is_relative_to(field.local)
    assert f"{planted}{part} belongs to user 54321, who may not write to" in caplog.text
    assert "delete it and warm up again" in caplog.text
    assert CompileCache(field.root, field.local, trusted=True).try_load(key) is not None


def test_cache_that_a_group_can_write_is_used(cache, key, compiler, field):
    field.root.mkdir()
    field.root.chmod(0o2770)
    assert cache.build(key, compiler(key)).path.is_relative_to(field.root)
    for path in [field.root, *field.root.rglob("*")]:
        wanted = 0o2770 if path.is_dir() else 0o660
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_umask_decides_of_a_new_cache_and_opens_it_to_nobody_else(
    cache, key, compiler, field, umask
):
    before = os.umask(umask)
    try:
        artefact = cache.build(key, compiler(key))
        assert cache.try_load(key) is not None
    finally:
        os.umask(before)
    assert stat.S_IMODE(field.root.stat().st_mode) == 0o775 & ~umask
    assert stat.S_IMODE(artefact.path.stat().st_mode) == 0o775 & ~umask
    assert stat.S_IMODE(artefact.file("kernel.so").stat().st_mode) == 0o664 & ~umask


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_file_system_without_modes_and_without_counts(
    cache, key, compiler, field, monkeypatch, number
):
    """As some network file systems are: modes cannot be set, and no free space is reported."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    field.root.mkdir()
    field.root.chmod(0o2770)
    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096) + (0,) * 8))
    assert cache.build(key, compiler(key)).path.is_relative_to(field.root)


@pytest.mark.parametrize("free", [0, 1, (8 << 20) // 4096 - 1])
def test_full_disk_costs_no_compile_and_one_line(cache, compiler, field, monkeypatch, caplog, free):
    real = os.statvfs

    def few(folder):
        inside = folder.is_relative_to(field.root)
        counts = (4096, 4096, 10**6, free, free, 0, 0, 0, 0, 255)
        return os.statvfs_result(counts) if inside else real(folder)

    monkeypatch.setattr(os, "statvfs", few)
    for size in range(1, 6):
        key = make_key(size)
        assert cache.build(key, compiler(key)).path.is_relative_to(field.local)
    assert field.builds() == dict.fromkeys(range(1, 6), 1)
    assert caplog.text.count("No space left on device (ENOSPC)") == 1


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_build_that_leaves_other_things_than_files_fails(cache, key, compiler, field, kind):
    def build(folder):
        compiler(key)(folder)
        if kind == "link":
            (folder / "other").symlink_to("kernel.so")
        else:
            os.mkfifo(folder / "other")

    with pytest.raises(CompileError, match=r"fake\[H=1.*is not a regular file"):
        cache.build(key, build)
    assert cache.try_load(key) is None and list((field.root / "staging").iterdir()) == []


# Links


def test_link_in_the_way_to_a_cache_is_followed(field, key, compiler):
    (field.folder / "disk" / "deep").mkdir(parents=True)
    (field.folder / "one").symlink_to("disk/deep/../two")
    (field.folder / "disk" / "two").symlink_to(field.folder / "disk" / "deep")
    for cache in (
        CompileCache(field.folder / "one" / "cache", field.local),
        CompileCache(Path("/proc/1/mem"), field.folder / "one" / "local"),
    ):
        assert load(cache.build(key, compiler(key))) == 4096
        assert cache.try_load(key) is not None
    assert sorted(os.listdir(field.folder / "disk" / "deep")) == ["cache", "local"]


def test_circle_of_links_is_a_miss(field, key, compiler):
    field.root.symlink_to(field.root)
    cache = CompileCache(field.root, field.local)
    assert cache.try_load(key) is None
    assert cache.build(key, compiler(key)).path.is_relative_to(field.local)


@pytest.mark.parametrize("name", ["artefacts", "artefacts/fake", "artefacts/fake/{digest}"])
def test_link_below_the_cache_is_refused(cache, key, compiler, field, name):
    cache.build(key, compiler(key))
    path = field.root / name.format(digest=key.digest)
    path.rename(field.folder / "elsewhere")
    path.symlink_to(field.folder / "elsewhere")
    assert cache.try_load(key) is None


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "FIFO"])
def test_note_beside_a_lock_writes_to_nobody_elses_file(cache, key, compiler, field, kind):
    victim = field.folder / "victim"
    victim.write_text("precious")
    note = field.root / "locks" / f"fake-{key.digest}.json"
    note.parent.mkdir(parents=True)
    if kind == "symbolic link":
        note.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, note)
    else:
        os.mkfifo(note)
    artefact = cache.build(key, compiler(key))
    assert artefact.path.is_relative_to(field.root)
    assert victim.read_text() == "precious"
    assert json.loads(note.read_text())["state"] == "published" and not note.is_symlink()


def test_lock_is_no_link(cache, key, compiler, field):
    lock = field.root / "locks" / f"fake-{key.digest}.lock"
    lock.parent.mkdir(parents=True)
    lock.symlink_to(field.folder / "made by the victim")
    assert load(cache.build(key, compiler(key))) == 4096
    assert not (field.folder / "made by the victim").exists()


# Files that are none


def put_in_place(path, kind):
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        elsewhere = path.parents[4] / "elsewhere"
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends
    else:
        here = os.open(path.parent, os.O_RDONLY)  # a path of a socket may have 108 bytes
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


@pytest.mark.parametrize("name", ["kernel.so", "manifest.json"])
@pytest.mark.parametrize(
    "kind", ["link", "FIFO", "directory", "socket", pytest.param("device", marks=needs_root)]
)
def test_other_things_in_place_of_a_file_are_damage(cache, key, compiler, field, name, kind):
    path = cache.build(key, compiler(key)).path / name
    put_in_place(path, kind)
    assert cache.try_load(key) is None
    assert load(cache.build(key, compiler(key))) == 4096
    assert path.is_file() and not path.is_symlink()
    assert len(list((field.root / "quarantine").iterdir())) == 1


# Manifests


def odd_manifests(manifest):
    facts = manifest["files"]["kernel.so"]
    yield "deeply nested", "[" * 100_000 + "]" * 100_000
    nested = '{"a":' * 300 + "1" + "}" * 300
    yield "nested, and parsed", json.dumps(manifest).replace('"1"', nested, 1)
    yield "a long number", '{"files": {}, "key": ' + "9" * 10_000 + "}"
    yield "large", json.dumps(manifest) + " " * (1 << 21)
    yield "not text", "\udcff\udcfe"
    for name in ["a\0b", "../kernel.so", "/etc/passwd", "", ".", "kernel.so/", "\ud800", "x" * 300]:
        yield f"name {name[:20]!r}", json.dumps({**manifest, "files": {name: facts}})
    yield "a file less", json.dumps({**manifest, "files": {}})


@pytest.mark.parametrize("number", range(14))
def test_odd_manifest_is_damage(cache, key, compiler, field, number):
    path = cache.build(key, compiler(key)).path / "manifest.json"
    _, text = list(odd_manifests(json.loads(path.read_text())))[number]
    path.write_text(text, errors="surrogateescape")
    assert cache.try_load(key) is None
    assert load(cache.build(key, compiler(key))) == 4096
    assert len(list((field.root / "quarantine").iterdir())) == 1
