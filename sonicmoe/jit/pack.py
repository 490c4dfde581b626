"""Packs: compiled kernels as one file, to ship to a cluster or into an image.

A pack is a plain tar file in one canonical form: `sonicmoe-pack.json` lists keys, sizes and
checksums, the files follow in its order, and the checksum of the list comes last. Only this form is
read. Every byte of a pack follows from its list and the files' contents, so a reader compares each
header with the one that has to be there. A link, a device, another path or another order is simply
not that header, and no name out of the archive is ever used.

The list and the files are checked completely before anything is published, and again while each
artefact is published on the store's own way. Checksums find damage; they do not say who made a
pack, so unpack only what you would run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .. import __version__
from ..errors import ConfigError, writing
from .cache import CompileCache
from .errors import PackError
from .files import FileFacts
from .key import VERDICT, CompileKey, host_abi, package_versions
from .manifest import MANIFEST, Artefact, utc_now
from .plan import NEITHER, PRECISIONS, ModelSpec
from .toolchain import find_toolkit

LIST, CHECKSUM = "sonicmoe-pack.json", "sonicmoe-pack.sha256"
FORMAT = 1
_BLOCK = 512
_LARGEST_LIST, _LARGEST_FILE, _MOST_FILES = 16 << 20, 256 << 20, 10_000
_COMPILERS = ("nvidia-cutlass-dsl", "quack-kernels", "triton")
_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PackedArtefact:
    """One artefact of a pack: its key, and the facts of its files by name."""

    key: CompileKey
    files: dict[str, FileFacts]

    def member(self, name: str) -> str:
        """The name of a file of it in the tar file."""
        return f"artefacts/{self.key.kernel}/{self.key.digest}/{name}"


@dataclass(frozen=True)
class Pack:
    """What a pack says of itself.

    Attributes:
        versions: of this package, apache-tvm-ffi, the compilers, and the ABI.
        artefacts: in the order of the file.
        model: whose kernels they are.
        precision: of that model.
        at: when it was made.
    """

    versions: dict[str, str]
    artefacts: tuple[PackedArtefact, ...]
    model: ModelSpec
    precision: str
    at: str

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(sorted({artefact.key.arch for artefact in self.artefacts}))


def versions_here() -> dict[str, str]:
    """Versions on which it depends whether a packed kernel is found and loads here."""
    toolkit = find_toolkit()
    return {
        "sonicmoe": __version__,
        "abi": host_abi(),
        **dict(package_versions("apache-tvm-ffi", *_COMPILERS)),
        "nvcc": toolkit.version if toolkit else "absent",
    }


def write_pack(path: Path, artefacts: Iterable[Artefact], model: ModelSpec, precision: str) -> Pack:
    """Write verified artefacts to `path`, which appears complete or not at all. Verdicts on engines
    hold for the machine that found them, and are left out. PackError where there is none, or one
    changed while it was read; OSError where `path` cannot be written.
    """
    distinct = {artefact.key: artefact for artefact in artefacts}.values()
    held = [artefact for artefact in distinct if artefact.key.kernel != VERDICT]
    if not held:
        raise PackError(f"{path}: there is nothing to pack")
    pack = Pack(versions_here(), tuple(map(_packed, held)), model, precision, utc_now())
    text = _text_of(pack)
    with _appearing(path) as out:
        _write_member(out, LIST, text)
        for artefact, packed in zip(held, pack.artefacts, strict=True):
            for name, facts in packed.files.items():
                content = artefact.file(name).read_bytes()
                if FileFacts(len(content), hashlib.sha256(content).hexdigest()) != facts:
                    raise PackError(f"{artefact.file(name)} changed while it was packed")
                _write_member(out, packed.member(name), content)
        _write_member(out, CHECKSUM, hashlib.sha256(text).hexdigest().encode())
        out.write(bytes(2 * _BLOCK))
    return pack


def read_pack(path: Path) -> Pack:
    """The list of a pack whose every byte has been checked. PackError, in one line, where it is no
    pack or a damaged one; OSError where it cannot be read.
    """
    with _opened(path) as stream:
        pack = _Reader(stream, path).pack()
    return pack


def refusal(pack: Pack, arch: str | None = None) -> str | None:
    """Why this installation cannot use a pack, in one line, or None.

    A compiler that is absent here does not matter, because a machine without it takes the kernels
    of any version of it. `arch`: what the kernels must be for, if one was asked for.
    """
    here = versions_here()
    for name, packed in pack.versions.items():
        optional = name in (*_COMPILERS, "nvcc")
        found = here.get(name, "absent")
        if found != packed and not (optional and "absent" in (found, packed)):
            return f"it was packed with {name} {packed}, and here it is {found}"
    if arch is not None and pack.architectures != (arch,):
        return f"its kernels are for {', '.join(pack.architectures)}, and {arch} is needed"
    return None


def unpack(path: Path, cache: CompileCache) -> Pack:
    """Publish every artefact of a pack in the cache; what is there already stays. PackError where
    the pack is damaged, and then nothing was published; CacheUnwritableError where neither
    directory of the cache can take it.
    """
    with _opened(path) as stream:
        reader = _Reader(stream, path)
        pack = reader.pack()
        for artefact in pack.artefacts:
            # A pack of an earlier build may carry verdicts, which say nothing of this machine.
            if artefact.key.kernel != VERDICT:
                cache.install(artefact.key, functools.partial(reader.extract, artefact))
    return pack


class _Reader:
    """Reads a pack from its beginning, and refuses the first byte that has no business there."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path
        self._starts: dict[CompileKey, int] = {}

    def pack(self) -> Pack:
        """Check everything."""
        pack = self._list()
        for artefact in pack.artefacts:
            self._starts[artefact.key] = self._stream.tell()
            for name, facts in artefact.files.items():
                self._member(artefact.member(name), facts)
        self._end()
        return pack

    def extract(self, artefact: PackedArtefact, folder: Path) -> None:
        """Write the files of an artefact into a private folder, checked once more, because the pack
        may have been overwritten since. The store calls it twice where its first directory is full.
        """
        self._stream.seek(self._starts[artefact.key])
        for name, facts in artefact.files.items():
            content = self._member(artefact.member(name), facts)
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def _list(self) -> Pack:
        """Read the list, and leave the stream at the first file."""
        header = self._read(_BLOCK)
        try:
            size = tarfile.TarInfo.frombuf(header, "utf-8", "strict").size
        except (tarfile.TarError, ValueError):
            raise self._wrong("it is not a pack of sonicmoe") from None
        if not 0 <= size <= _LARGEST_LIST or header != _header(LIST, size):
            raise self._wrong("it is not a pack of sonicmoe")
        self._text = self._read(size)
        self._padding(size)
        try:
            return _parsed(self._text)
        except PackError as error:
            raise self._wrong(str(error)) from None

    def _end(self) -> None:
        digest = hashlib.sha256(self._text).hexdigest().encode()
        facts = FileFacts(len(digest), hashlib.sha256(digest).hexdigest())
        self._member(CHECKSUM, facts)
        if self._stream.read(2 * _BLOCK + 1) != bytes(2 * _BLOCK):
            raise self._wrong("it does not end where it should")

    def _member(self, name: str, facts: FileFacts) -> bytes:
        if self._read(_BLOCK) != _header(name, facts.size):
            raise self._wrong(f"{name} is not where it should be")
        content = self._read(facts.size)
        if hashlib.sha256(content).hexdigest() != facts.sha256:
            raise self._wrong(f"{name} does not match its checksum")
        self._padding(facts.size)
        return content

    def _padding(self, size: int) -> None:
        count = -size % _BLOCK
        if self._read(count) != bytes(count):
            raise self._wrong("there is something between two files")

    def _read(self, count: int) -> bytes:
        found = self._stream.read(count)
        if len(found) != count:
            raise self._wrong("it is cut off")
        return found

    def _wrong(self, why: str) -> PackError:
        return PackError(f"{self._path}: {why}")


def _packed(artefact: Artefact) -> PackedArtefact:
    files = artefact.manifest["files"]
    named = {name: FileFacts(files[name]["size"], files[name]["sha256"]) for name in sorted(files)}
    # The key that found it may lack the toolchain, where there is no compiler.
    return PackedArtefact(CompileKey.from_record(artefact.manifest["key"]), named)


def _text_of(pack: Pack) -> bytes:
    """The list as it is stored."""
    artefacts = [
        {
            "key": artefact.key.record(),
            "files": {name: facts._asdict() for name, facts in artefact.files.items()},
        }
        for artefact in pack.artefacts
    ]
    content = {
        "format": FORMAT,
        "versions": pack.versions,
        "model": asdict(pack.model),
        "precision": pack.precision,
        "at": pack.at,
        "artefacts": artefacts,
    }
    return json.dumps(content, indent=1).encode()


def _parsed(text: bytes) -> Pack:
    """The list of a pack, with every field checked."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise PackError(f"it has format {content['format']!r}; this version reads {FORMAT}")
        versions = {str(name): str(found) for name, found in content["versions"].items()}
        pack = Pack(
            versions,
            tuple(map(_parsed_artefact, content["artefacts"])),
            ModelSpec(**content["model"]),
            content["precision"],
            str(content["at"]),
        )
        files = sum(len(artefact.files) for artefact in pack.artefacts)
        if len({artefact.key for artefact in pack.artefacts}) != len(pack.artefacts):
            raise ValueError
        if not 0 < files <= _MOST_FILES or pack.precision not in (NEITHER, *PRECISIONS):
            raise ValueError
    except PackError:
        raise
    # Whatever form the list has, it is not the one that this version writes.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError):
        raise PackError(f"its {LIST} is damaged") from None
    return pack


def _parsed_artefact(entry: Any) -> PackedArtefact:
    key = CompileKey.from_record(entry["key"])
    return PackedArtefact(key, dict(_parsed_file(*item) for item in entry["files"].items()))


def _parsed_file(name: str, facts: Any) -> tuple[str, FileFacts]:
    found = FileFacts(facts["size"], facts["sha256"])
    plain = all(map(_NAME.fullmatch, name.split("/"))) and name != MANIFEST
    sized = type(found.size) is int and 0 <= found.size <= _LARGEST_FILE
    if not plain or not sized or not _SHA256.fullmatch(found.sha256):
        raise ValueError
    return name, found


def _header(name: str, size: int) -> bytes:
    """The one header that a regular file of this name and size has in a pack."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        raise PackError(f"{name} does not fit into a pack: {error}") from None


def _write_member(out: IO[bytes], name: str, content: bytes) -> None:
    out.write(_header(name, len(content)) + content + bytes(-len(content) % _BLOCK))


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    # A fifo in its place would block; `O_NONBLOCK` opens it, and the first read finds it empty.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


@contextmanager
def _appearing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name `path` when the block ends well, and none when it does not."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with writing(path), open(partial, "xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
