"""Packs: compiled kernels as one file, to ship to a cluster or into an image.

A pack is a zip file: `sonicmoe-pack.json`, which lists the keys, and the files of each artefact. All
of it is read and compared with its checksums before anything is published, and each artefact takes
the store's own way. Checksums find damage; they do not say who made a pack, so unpack only what you
would run.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import secrets
import stat
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import expect, writing
from .cache import CompileCache
from .errors import PackError
from .files import is_plain
from .key import VERDICT, CompileKey, host_abi, package_versions
from .manifest import MANIFEST, Artefact, utc_now
from .plan import NEITHER, PRECISIONS, ModelSpec
from .toolchain import find_toolkit

LIST = "sonicmoe-pack.json"
FORMAT = 3
_COMPILERS = ("nvidia-cutlass-dsl", "quack-kernels", "triton")


@dataclass(frozen=True)
class Pack:
    """What a pack says of itself.

    Attributes:
        versions: of this package, apache-tvm-ffi, the compilers, and the ABI.
        artefacts: the keys, in the order of the file.
        model: whose kernels they are.
        precision: of that model.
        at: when it was made.
    """

    versions: dict[str, str]
    artefacts: tuple[CompileKey, ...]
    model: ModelSpec
    precision: str
    at: str

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(sorted({key.arch for key in self.artefacts}))


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
    # The key that found an artefact may lack the toolchain, where there is no compiler.
    held = {CompileKey.from_record(each.manifest["key"]): each for each in artefacts}
    keys = tuple(key for key in held if key.kernel != VERDICT)
    expect(bool(keys), PackError, f"{path}: there is nothing to pack")
    pack = Pack(versions_here(), keys, model, precision, utc_now())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(LIST, _text_of(pack))
        for key in keys:
            for name, facts in sorted(held[key].manifest["files"].items()):
                content = held[key].file(name).read_bytes()
                if hashlib.sha256(content).hexdigest() != facts["sha256"]:
                    raise PackError(f"{held[key].file(name)} changed while it was packed")
                out.writestr(f"{_folder_of(key)}/{name}", content)
    _write(path, archive.getvalue())
    return pack


def read_pack(path: Path) -> Pack:
    """The list of a pack whose every byte has been checked. PackError, in one line, where it is no
    pack or a damaged one; OSError where it cannot be read.
    """
    return _contents(path)[0]


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
    pack, files = _contents(path)
    for key in pack.artefacts:
        # A pack of an earlier build may carry verdicts, which say nothing of this machine.
        if key.kernel != VERDICT:
            cache.install(key, functools.partial(_extract, files[key]))
    return pack


def _contents(path: Path) -> tuple[Pack, dict[CompileKey, dict[str, bytes]]]:
    """The list, and the content of each file by key and name."""
    # Read once, so that what was checked is what is published, whatever becomes of the file.
    whole = _read(path)
    try:
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        pack = _parsed(members.pop(LIST))
        return pack, _by_key(pack, members)
    except PackError as error:
        raise PackError(f"{path}: {error}") from None
    # A damaged archive or list raises one of many types.
    except Exception:
        words = "it is not a pack of sonicmoe, or it is damaged or cut off"
        raise PackError(f"{path}: {words}") from None


def _by_key(pack: Pack, members: dict[str, bytes]) -> dict[CompileKey, dict[str, bytes]]:
    """The files of each key. PackError where a file belongs to none, or a key has none."""
    keys = {_folder_of(key): key for key in pack.artefacts}
    found: dict[CompileKey, dict[str, bytes]] = {key: {} for key in pack.artefacts}
    for member, content in members.items():
        folder, _, name = member.rpartition("/")
        if folder not in keys or name == MANIFEST or not is_plain(name):
            raise PackError(f"{member!a} has no business there")
        found[keys[folder]][name] = content
    for key, files in found.items():
        expect(bool(files), PackError, f"{_folder_of(key)} is missing")
    return found


def _extract(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _folder_of(key: CompileKey) -> str:
    return f"artefacts/{key.kernel}/{key.digest}"


def _text_of(pack: Pack) -> bytes:
    """The list as it is stored."""
    content = {
        "format": FORMAT,
        "versions": pack.versions,
        "model": asdict(pack.model),
        "precision": pack.precision,
        "at": pack.at,
        "artefacts": [key.record() for key in pack.artefacts],
    }
    return json.dumps(content, indent=1).encode()


def _parsed(text: bytes) -> Pack:
    """The list of a pack, with every field checked. PackError for another format; where it is damaged,
    whatever its parts raise.
    """
    content: dict[str, Any] = json.loads(text)
    if content["format"] != FORMAT:
        raise PackError(f"it has format {content['format']!r}; this version reads {FORMAT}")
    pack = Pack(
        {str(name): str(found) for name, found in content["versions"].items()},
        tuple(map(CompileKey.from_record, content["artefacts"])),
        ModelSpec(**content["model"]),
        content["precision"],
        str(content["at"]),
    )
    distinct = 0 < len(pack.artefacts) == len(set(pack.artefacts))
    if not distinct or pack.precision not in (NEITHER, *PRECISIONS):
        raise ValueError
    return pack


def _read(path: Path) -> bytes:
    # A fifo in its place would block; `O_NONBLOCK` opens it. A device may have no end.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        expect(regular, PackError, f"{path}: it is not a regular file")
        return stream.read()


def _write(path: Path, content: bytes) -> None:
    """`path` appears complete, or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with writing(path), open(partial, "xb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
