"""The manifest of an artefact directory: which key it is for, and the size and checksum of every
file.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files as file_system
from .files import DamagedFileError, FileFacts, parse_json
from .key import CompileKey
from .place import Place

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


def describe(key: CompileKey, files: Mapping[str, FileFacts], seconds: float) -> dict[str, Any]:
    """The manifest of an artefact with these files; `seconds` is the time that the build took."""
    built = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "seconds": round(seconds, 3),
        "at": utc_now(),
    }
    promised = {
        "key": key.record(),
        "files": {name: facts._asdict() for name, facts in files.items()},
    }
    return {**promised, "sha256": _digest(promised), "built": built}


def verify(key: CompileKey, folder: Place) -> Artefact:
    """The artefact in `folder`. Clocks and modification times do not matter. DamagedFileError where
    it was read and is not an artefact of `key`; OSError where it could not be read, or somebody
    else could have planted it.
    """
    name = MANIFEST
    try:
        manifest = parse_json(file_system.read_text(folder, MANIFEST))
        # Only listed files are checked. An additional file, such as one that a network file system
        # leaves behind after a delete, does no harm.
        for name, facts in _listed(key, manifest).items():
            file_system.check(folder, name, facts)
    except DamagedFileError as damage:
        # A name out of a damaged manifest may hold anything, also control sequences of a terminal.
        raise DamagedFileError(f"{ascii(name)[1:-1]} {damage}") from None
    except RecursionError:  # nesting that the parser survived, and a comparison does not
        raise DamagedFileError(f"{MANIFEST} is nested too deeply") from None
    return Artefact(key, folder.path, manifest)


def _listed(key: CompileKey, manifest: Any) -> dict[str, FileFacts]:
    """The files of a manifest, after its form, its key and its own checksum were checked."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise DamagedFileError("is no manifest")
    # The directory name holds only a shortened digest; the record in the manifest is the whole key.
    if not key.accepts(manifest.get("key")):
        raise DamagedFileError("belongs to another key")
    # Without a checksum of its own, a manifest that lost a line would describe a smaller artefact.
    promised = {name: manifest[name] for name in ("key", "files")}
    if manifest.get("sha256") != _digest(promised):
        raise DamagedFileError("does not match its own checksum")
    try:
        return {
            name: FileFacts(facts["size"], facts["sha256"])
            for name, facts in manifest["files"].items()
        }
    # Entries of another form, for example of a later version.
    except (KeyError, TypeError):
        raise DamagedFileError("describes its files in another form") from None


def _digest(promised: dict[str, Any]) -> str:
    text = json.dumps(promised, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def utc_now() -> str:
    """The time in UTC, to the second. People read it; no code compares it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
