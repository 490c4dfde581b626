"""The manifest of an artefact directory: which key it is for, and the size and checksum of every
file.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import StoreFiles, sha256_of
from .key import CompileKey

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Artefact:
    """A verified, published, immutable directory."""

    key: CompileKey
    path: Path
    manifest: dict[str, Any]

    def file(self, name: str) -> Path:
        """The path of one file of the artefact; KeyError if the manifest does not list it."""
        if name not in self.manifest["files"]:
            raise KeyError(
                f"{name} is not in the artefact of {self.key}: it has {sorted(self.manifest['files'])}"
            )
        return self.path / name


def describe(key: CompileKey, folder: Path, seconds: float) -> dict[str, Any]:
    """The manifest of the files below `folder`; `seconds` is the time that the build took."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in paths
    }
    built = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "seconds": round(seconds, 3),
        "at": utc_now(),
    }
    return {"key": key.record(), "files": files, "built": built}


def verify(key: CompileKey, folder: Path, files: StoreFiles) -> Artefact | str:
    """The artefact in `folder`, or the reason why it is not one. Clocks and modification times do
    not matter.

    Size first and checksum second: a truncated file, the usual damage, is found without reading it.
    """
    manifest = files.read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"{MANIFEST} is missing or unreadable"
    # The directory name holds only a shortened digest; the record in the manifest is the whole key.
    if not key.accepts(manifest.get("key")):
        return f"{MANIFEST} belongs to another key"
    # Only listed files are checked. An additional file, such as one that a network file system
    # leaves behind after a delete, does no harm.
    for name, expected in manifest["files"].items():
        problem = _file_problem(folder / name, expected)
        if problem:
            return f"{name} {problem}"
    return Artefact(key, folder, manifest)


def _file_problem(path: Path, expected: Any) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            return f"has {size} bytes instead of {expected['size']}"
        return None if sha256_of(path) == expected["sha256"] else "does not match its checksum"
    # KeyError and TypeError come from a manifest whose entries have another form, for example of a
    # later version.
    except (OSError, KeyError, TypeError) as error:
        return f"cannot be verified ({error})"


def utc_now() -> str:
    """The time in UTC, to the second. People read it; no code compares it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
