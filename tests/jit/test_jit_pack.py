"""Packs: a round trip, and everything that is not exactly a pack of this installation."""

import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from damage import BYTE_KINDS, variants
from fake_jobs import FakeJob
from racer import load, make_key

from sonicmoe.cli.main import main
from sonicmoe.jit import CompileCache, CompileKey, no_compile
from sonicmoe.jit import pack as pack_module
from sonicmoe.jit.errors import PackError
from sonicmoe.jit.pack import LIST, read_pack, refusal, unpack, write_pack
from sonicmoe.jit.plan import ModelSpec

SPEC = ModelSpec(8, 3072, 1536)
MUTATIONS = 120


@pytest.fixture
def packed(field, cache, jobs):
    """A pack of three artefacts."""
    path = field.folder / "kernels.pack"
    write_pack(path, [job.compile(cache) for job in jobs(3)], SPEC, "fp8")
    return path


@pytest.fixture
def elsewhere(field):
    """The empty cache of another machine."""
    return CompileCache(field.folder / "elsewhere", field.folder / "elsewhere-local")


def is_empty(cache):
    return not (cache.root / "artefacts").exists() and not cache.local_root.exists()


def test_round_trip(packed, elsewhere, field):
    with no_compile():
        pack = unpack(packed, elsewhere)
    assert pack.model == SPEC and pack.precision == "fp8" and pack.architectures == ("sm_90a",)
    for size in (1, 2, 3):
        artefact = elsewhere.try_load(make_key(size))
        assert artefact is not None and load(artefact) == 4096
    assert sum(field.builds().values()) == 3, "nothing was compiled for it"
    assert unpack(packed, elsewhere) == pack, "again, into a cache that has everything"


def test_no_pack_carries_a_verdict_of_another_machine(cache, elsewhere, field, monkeypatch):
    """Neither is one written, nor is one of an earlier build taken over."""
    key = CompileKey.make(
        "verdict", arch="sm_90a", statics={}, fingerprint={"driver": "580.0"}, toolchain={}
    )
    verdict = cache.install(key, lambda folder: (folder / "verdict.json").write_text("{}"))
    kernel, path = FakeJob(1, field.log).compile(cache), field.folder / "kernels.pack"
    for name in ("verdict", "an earlier build knows none"):
        monkeypatch.setattr(pack_module, "VERDICT", name)
        pack = write_pack(path, [verdict, kernel], SPEC, "fp8")
        both = [verdict.key, kernel.key]
        assert list(pack.artefacts) == both[-len(pack.artefacts) :]
        monkeypatch.undo()
        unpack(path, elsewhere)
        assert elsewhere.try_load(make_key(1)) is not None
        assert elsewhere.try_load(key) is None
    assert len(pack.artefacts) == 2
    with pytest.raises(PackError, match="there is nothing to pack"):
        write_pack(path, [verdict], SPEC, "fp8")


def test_what_cannot_be_written_leaves_nothing(cache, field, monkeypatch):
    artefact = FakeJob(1, field.log).compile(cache)
    (artefact.path / "kernel.so").write_bytes(b"changed")
    path = field.folder / "kernels.pack"
    path.write_text("an older pack")
    with pytest.raises(PackError, match="changed while it was packed"):
        write_pack(path, [artefact], SPEC, "fp8")
    assert path.read_text() == "an older pack"
    assert not list(field.folder.glob(".kernels*"))


def test_damage_is_refused_or_of_no_consequence(packed, elsewhere):
    """Bytes that do not reach a kernel, such as the date of a file, may pass."""
    damaged = variants(packed.read_bytes(), 20261122, MUTATIONS, BYTE_KINDS)
    refused = 0
    for number, (_, content) in enumerate(damaged):
        packed.write_bytes(content)
        try:
            unpack(packed, elsewhere)
        except PackError as error:
            refused += 1
            assert str(error).startswith(f"{packed}: ") and "\n" not in str(error)
            assert is_empty(elsewhere), number
        else:
            for key in map(make_key, (1, 2, 3)):
                artefact = elsewhere.try_load(key)
                assert artefact is None or load(artefact) == 4096, number
            shutil.rmtree(elsewhere.root)
    assert refused > MUTATIONS / 2


def rebuilt(path, change):
    """Write a pack again with other members: what an attacker would do. `change(listed, members)` gets
    the list and the content of each file by name.
    """
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    listed = json.loads(members.pop(LIST))
    change(listed, members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {LIST: json.dumps(listed), **members}.items():
            archive.writestr(name, content)


def rename_first(members, to):
    """The first file of the first artefact, under another name."""
    name = next(iter(members))
    members[f"{name.rpartition('/')[0]}/{to}"] = members.pop(name)


HOSTILE = [
    *(lambda _, members, to=to: rename_first(members, to) for to in (
        "../kernel.so", "/etc/passwd", "a/../../kernel.so", "..", ".", "", "a//b", "manifest.json",
    )),
    lambda _, members: members.pop(next(iter(members))),
    lambda _, members: members.update({"../../evil": b""}),
    lambda listed, _: listed["artefacts"].pop(),
    lambda listed, _: listed["artefacts"][0]["statics"].update(H=7),
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE)
def test_a_member_that_has_no_business_in_a_pack(packed, elsewhere, change):
    rebuilt(packed, change)
    with pytest.raises(PackError, match=r"has no business there|is missing"):
        unpack(packed, elsewhere)
    assert is_empty(elsewhere)


def set_in(*path, value):
    def change(listed, _):
        for name in path[:-1]:
            listed = listed[name]
        listed[path[-1]] = value

    return change


@pytest.mark.parametrize("change", [
    set_in("artefacts", 0, "kernel", value="../../fake"),
    set_in("artefacts", 0, "arch", value="sm_90a/.."),
    set_in("artefacts", 0, "layout", value=99),
    set_in("artefacts", 0, "toolchain", value=None),
    set_in("artefacts", 0, "toolchain", value={"cc": [1]}),
    set_in("artefacts", 0, value="fake"),
    lambda listed, _: listed["artefacts"].append(listed["artefacts"][0]),
    set_in("artefacts", value=[]),
    set_in("artefacts", value={}),
    set_in("model", "H", value=-3),
    set_in("model", value={"__class__": "os"}),
    set_in("model", value=None),
    set_in("precision", value=""),
    set_in("precision", value="fp4"),
    set_in("versions", value=None),
])  # fmt: skip
def test_a_list_that_says_something_else(packed, elsewhere, change):
    rebuilt(packed, change)
    with pytest.raises(PackError, match="it is not a pack of sonicmoe, or it is damaged"):
        unpack(packed, elsewhere)
    assert is_empty(elsewhere)


def test_a_file_that_is_no_pack(packed, tmp_path):
    rebuilt(packed, set_in("format", value=1))
    with pytest.raises(PackError, match="it has format 1; this version reads 3"):
        read_pack(packed)
    for content in (b"", b"\0" * 4096, b"PK\x03\x04" * 300, b"\xff" * 1024):
        packed.write_bytes(content)
        with pytest.raises(PackError):
            read_pack(packed)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(PackError, match="it is not a regular file"):
            read_pack(path)


@pytest.mark.parametrize(("name", "version", "words"), [
    ("sonicmoe", "0.0.1", "it was packed with sonicmoe 0.0.1, and here it is "),
    ("apache-tvm-ffi", "0.0.9", "it was packed with apache-tvm-ffi 0.0.9, and here it is "),
    ("abi", "aarch64-glibc", "it was packed with abi aarch64-glibc, and here it is "),
    ("nvcc", "11.0.0", "it was packed with nvcc 11.0.0, and here it is 13"),
    ("nvcc", "absent", None),
    ("triton", "absent", None),
])  # fmt: skip
def test_versions_that_differ(packed, name, version, words, monkeypatch):
    pack = read_pack(packed)
    here = pack.versions | {"nvcc": "13.0.88"}
    monkeypatch.setattr(pack_module, "versions_here", lambda: here)
    reason = refusal(replace(pack, versions=here | {name: version}))
    assert reason is None if words is None else str(reason).startswith(words)


def command(*arguments):
    result = CliRunner().invoke(main, ["warmup", *map(str, arguments)])
    return result.exit_code, result.output


def test_errors_of_the_command_are_one_line(own_caches, cache, jobs):
    absent = own_caches.folder / "absent.pack"
    for arguments, words in (
        (("--unpack", absent), f"{absent}: No such file or directory"),
        (("--unpack", absent, "--E", 8), "--E has no effect beside --unpack"),
    ):
        code, said = command(*arguments)
        assert code == 2 and words in said, said
    write_pack(absent, [jobs(1)[0].compile(cache)], SPEC, "fp8")
    code, said = command("--unpack", absent, "--arch", "sm_100a")
    assert code == 2 and said.startswith("Error: ") and said.count("\n") == 1
    assert "its kernels are for sm_90a, and sm_100a is needed" in said
