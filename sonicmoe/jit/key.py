"""Compile keys: what an artefact depends on, with a digest that is the same in every process and on
every machine.

A key holds static model dimensions, never a token count: a new batch size or routing distribution
compiles nothing.
This is a leaf module: standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import KeyFieldError

LAYOUT = 2  # of artefact directories; part of every digest, so that another layout is a miss
# In place of a kernel's name: an artefact that says what was found out on this kind of machine. It
# compiles nothing, and no pack carries it.
VERDICT = "verdict"

# The kernel name becomes a directory and part of file names, so neither it nor the architecture may
# hold a slash or a dot that leads out of the cache.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ARCH = re.compile(r"[a-z]+_?[0-9]+[a-z]?")

Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class CompileKey:
    """The identity of one artefact. Build it with `CompileKey.make`, which sorts and checks.

    Attributes:
        kernel: a lower-case identifier; the directory of all its artefacts.
        arch: the architecture compiled for ("sm_90a"), not the one of this machine.
        statics: dimensions, dtype, tile, flags: everything the generated code depends on. Sorted
            pairs.
        fingerprint: facts that every loading machine knows, also one without the compiler: digest
            of the source bytes, ABI. Sorted pairs.
        toolchain: compiler and package versions; None on a machine without the compiler, which can
            then load an artefact of any toolchain but build none.
    """

    kernel: str
    arch: str
    statics: Pairs
    fingerprint: Pairs
    toolchain: Pairs | None

    @classmethod
    def make(
        cls,
        kernel: str,
        *,
        arch: str,
        statics: Mapping[str, Any],
        fingerprint: Mapping[str, str],
        toolchain: Mapping[str, str] | None,
    ) -> CompileKey:
        """A checked, sorted key; arguments as the attributes. Values of `statics` are str, int,
        bool, None, an Enum of those, or a sequence of those. KeyFieldError for another one, or for
        a bad name.
        """
        if not _NAME.fullmatch(kernel):
            raise KeyFieldError(
                f"kernel={kernel!r}; needed: a lower-case identifier of at most 64 characters"
            )
        if not _ARCH.fullmatch(arch):
            raise KeyFieldError(f"arch={arch!r} of kernel {kernel}; needed: a name like 'sm_90a'")
        normalised = {name: _plain(value, f"{kernel}.{name}") for name, value in statics.items()}
        return cls(
            kernel,
            arch,
            _pairs(normalised),
            _pairs(fingerprint),
            # `None` and an empty mapping differ: None says that the compiler is absent, {} that no
            # version matters.
            None if toolchain is None else _pairs(toolchain),
        )

    @classmethod
    def from_record(cls, record: Any) -> CompileKey:
        """The key that a manifest stores: the inverse of `record`, for one with a toolchain.
        ValueError, KeyError, TypeError or AttributeError where it is no such record.
        """
        names = ("statics", "fingerprint", "toolchain")
        key = cls.make(
            record["kernel"], arch=record["arch"], **{name: record[name] for name in names}
        )
        texts = [*record["fingerprint"].values(), *record["toolchain"].values()]
        if not all(isinstance(text, str) for text in texts) or not key.accepts(record):
            raise ValueError("a record of another form")  # for example of another layout
        return key

    # One build asks for the hash many times (lookup, lock, messages), so it is kept.
    # `cached_property` writes into the instance's `__dict__`, which a frozen dataclass allows.
    @functools.cached_property
    def family(self) -> str:
        """20 hex digits over everything but the toolchain: the artefacts that can stand in for each
        other.
        """
        return _digest({**self._identity(), "toolchain": None})[:20]

    @functools.cached_property
    def digest(self) -> str:
        """`<family>-<12 hex digits of the toolchain>`: the directory name. Only for a key with a
        toolchain. KeyFieldError for another one.
        """
        if self.toolchain is None:
            raise KeyFieldError(f"{self} has no toolchain on this machine, so no digest of its own")
        # The family comes first, so that a machine without a compiler finds the artefacts of every
        # toolchain by the prefix of their directory names.
        return f"{self.family}-{_digest(self.toolchain)[:12]}"

    def record(self) -> dict[str, Any]:
        """The key as the manifest stores it: JSON types only; compare with `accepts`."""
        return {
            **self._identity(),
            "toolchain": None if self.toolchain is None else dict(self.toolchain),
        }

    def accepts(self, record: Any) -> bool:
        """Whether a manifest's record is this key's; a key without a toolchain accepts any
        toolchain.
        """
        # The stored record went through JSON, which turns tuples into lists. This key's record
        # takes the same way before the comparison.
        wanted = json.loads(json.dumps(self.record()))
        if not isinstance(record, dict):
            return False
        compared = [name for name in wanted if name != "toolchain" or self.toolchain is not None]
        return all(record.get(name) == wanted[name] for name in compared)

    def _identity(self) -> dict[str, Any]:
        return {
            "layout": LAYOUT,
            "kernel": self.kernel,
            "arch": self.arch,
            "statics": dict(self.statics),
            "fingerprint": dict(self.fingerprint),
        }

    def __str__(self) -> str:
        """`kernel[fields, arch] key digest`, as messages name it."""
        fields = ", ".join(f"{name}={value}" for name, value in self.statics)
        name = self.family if self.toolchain is None else self.digest
        return f"{self.kernel}[{fields}{', ' if fields else ''}arch={self.arch}] key {name}"


def source_fingerprint(files: Iterable[Path], include_dirs: Iterable[Path] = ()) -> str:
    """SHA-256 over the bytes of `files` and, recursively, of every header they include in quotes.
    FileNotFoundError where one of `files` does not exist.

    Independent of where the files lie; a quoted header found neither beside its includer nor in
    `include_dirs` belongs to the toolchain and does not count.
    """
    pending, seen, search = (
        [Path(file) for file in files],
        {},
        [Path(path) for path in include_dirs],
    )
    # The walk over includes is transitive and visits a header once, so headers that include each
    # other end it too. Conditional compilation is not evaluated: a header behind an #if counts
    # although the compiler may skip it, which can only cause a needless compile.
    while pending:
        file = pending.pop().resolve()
        if file in seen:
            continue
        seen[file] = content = file.read_bytes()
        for quoted in re.findall(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', content, re.MULTILINE):
            found = (folder / quoted.decode() for folder in [file.parent, *search])
            # The compiler takes the first match in this order, so only that one counts.
            pending.extend([path for path in found if path.is_file()][:1])
    # Names without folders: two checkouts of the same sources at different places share artefacts.
    entries = sorted(
        (file.name, hashlib.sha256(content).hexdigest()) for file, content in seen.items()
    )
    return _digest(entries)[:32]


@functools.cache
def package_versions(*packages: str) -> tuple[tuple[str, str], ...]:
    """(name, installed version or "absent") of each package, from metadata: imports nothing."""
    return tuple((package, _version(package)) for package in packages)


@functools.cache
def host_abi() -> str:
    """Processor and C library of this host, for example "x86_64-glibc": a shared object depends on
    both besides its sources.
    """
    # glibc and musl objects do not load into each other's processes, so the name of the library is
    # part of the key. Its version is not: a newer library loads older objects.
    return f"{platform.machine()}-{platform.libc_ver()[0] or platform.system().lower()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if isinstance(value, list | tuple):
        return tuple(_plain(item, where) for item in value)
    # Other values have no spelling that is the same in every process: the default text of an object
    # holds its address, and a float that was computed may differ in its last digit.
    if value is None or isinstance(value, str | int | bool):
        return value
    raise KeyFieldError(
        f"{where}={value!r} ({type(value).__name__}); needed: str, int, bool, None or a sequence of them"
    )


def _pairs(mapping: Mapping[str, Any]) -> Pairs:
    return tuple(sorted(mapping.items()))


def _digest(value: Any) -> str:
    # `hash()` is salted per process and `repr` of a mapping follows its insertion order. Sorted
    # JSON has one spelling everywhere.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
