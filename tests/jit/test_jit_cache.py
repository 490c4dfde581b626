"""One process: what the cache promises about artefacts, damage and refusal."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from racer import load, make_key

from sonicmoe.jit import CompileCache, no_compile
from sonicmoe.jit.errors import ArtefactLoadError, CompileForbiddenError, ToolchainError


def quarantined(field):
    return sorted((field.root / "quarantine").glob("*"))


def test_build_is_idempotent(cache, key, compiler, field):
    assert cache.try_load(key) is None
    first, second = cache.build(key, compiler(key)), cache.build(key, compiler(key))
    assert first.path == second.path == field.root / "artefacts" / "fake" / key.digest
    assert field.builds() == {1: 1}
    assert load(first) == 4096
    assert [path.name for path in (field.root / "staging").iterdir()] == []


def test_get_loads_once_and_threads_share(cache, key, compiler, field):
    calls = []

    def loader(artefact):
        calls.append(artefact)
        return object()

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(cache.get, key, compiler(key, seconds=0.1), loader) for _ in range(6)]
    assert len({id(each.result()) for each in asked}) == 1
    assert len(calls) == 1 and field.builds() == {1: 1}


def test_no_compile_covers_every_thread_and_names_kernel_and_key(cache, key, compiler, field):
    with no_compile(), ThreadPoolExecutor(1) as pool:
        errors = [pool.submit(cache.get, key, compiler(key), load).exception()]
        with pytest.raises(CompileForbiddenError) as raised:
            cache.get(key, compiler(key), load)
    for error in (*errors, raised.value):
        assert isinstance(error, CompileForbiddenError)
        for part in (str(key), "no_compile()", "sonicmoe warmup"):
            assert part in str(error)
    assert not field.log.exists()


def flip(folder):
    content = bytearray((folder / "kernel.so").read_bytes())
    content[2000] ^= 1
    (folder / "kernel.so").write_bytes(content)


def take_another_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["key"]["arch"] = "sm_80"
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = {
    "truncated": lambda folder: os.truncate(folder / "kernel.so", 1000),
    "a bit flipped": flip,
    "removed": lambda folder: (folder / "kernel.so").unlink(),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "another's manifest": take_another_manifest,
    "all removed": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_then_quarantined_and_rebuilt(damage, cache, key, compiler, field, caplog):
    DAMAGE[damage](cache.build(key, compiler(key)).path)
    assert cache.try_load(key) is None
    with no_compile(), pytest.raises(CompileForbiddenError, match="is damaged: "):
        cache.build(key, compiler(key))
    assert load(cache.build(key, compiler(key))) == 4096
    assert field.builds() == {1: 2}
    assert len(quarantined(field)) == 1
    assert "damaged artefact of fake[H=1" in caplog.text


def test_try_load_survives_odd_directories(tmp_path, key):
    a_file = tmp_path / "file"
    a_file.write_text("")
    for root in (a_file, tmp_path / "absent", a_file / "below", Path("/proc/1/mem"), Path("\0")):
        assert CompileCache(root, tmp_path / "local").try_load(key) is None


def test_another_architecture_or_version_is_a_miss(cache, compiler, field):
    variants = [make_key(), make_key(arch="sm_100a"), make_key(compiler="2")]
    cache.build(variants[0], compiler(variants[0]))
    assert [cache.try_load(key) is not None for key in variants] == [True, False, False]
    paths = {cache.build(key, compiler(key)).path for key in variants}
    assert len(paths) == 3
    assert all(load(artefact) for key in variants if (artefact := cache.try_load(key)))


def test_without_a_compiler_any_toolchain_loads_and_none_builds(cache, compiler):
    here = make_key(compiler=None)
    with pytest.raises(ToolchainError, match=r"fake\[H=1.*no artefact in.*sonicmoe warmup"):
        cache.build(here, compiler(here))
    built = cache.build(make_key(compiler="7"), compiler(make_key(compiler="7")))
    found = cache.try_load(here)
    assert found is not None and found.path == built.path
    assert cache.try_load(make_key(2, compiler=None)) is None


def test_failed_build_publishes_nothing_and_next_one_succeeds(cache, key, compiler, field):
    def fail(folder):
        (folder / "kernel.so").write_bytes(b"half")
        raise ValueError("line 3: expected ';'")

    with pytest.raises(ValueError, match="expected ';'"):
        cache.build(key, fail)
    assert cache.try_load(key) is None
    assert list((field.root / "staging").iterdir()) == []
    assert not field.local.exists(), "a compile error is no reason to try another directory"
    assert load(cache.build(key, compiler(key))) == 4096


def test_artefact_that_does_not_load_here_is_explained_and_kept(cache, key, compiler, field):
    def loader(artefact):
        raise OSError("version `GLIBC_2.99' not found")

    for _ in range(2):
        with pytest.raises(
            ArtefactLoadError, match=r"fake\[H=1.*not load on this host.*GLIBC_2.99"
        ):
            cache.get(key, compiler(key), loader)
    assert cache.get(key, compiler(key), load) == 4096
    assert field.builds() == {1: 1} and quarantined(field) == []
