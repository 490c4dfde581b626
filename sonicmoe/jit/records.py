"""Notes in a cache directory about its kernels, each a small JSON file: what a warm-up covered, and
what came from a pack. People read them; no kernel is loaded because of one.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from .cache import CompileCache
from .files import StoreFiles
from .place import Place, Trust

WARMED, UNPACKED = "warmed", "unpacked"  # the directories of both kinds


def write_record(cache: CompileCache, kind: str, name: str, content: dict[str, Any]) -> Path | None:
    """Write a record beside the artefacts, or on this node where the cache directory is read-only or
    full. None where neither takes it.
    """
    files = StoreFiles()
    for place in cache.places:
        target = place / kind / f"{name}.json"
        # Named by process: two that write the same record may end at the same time.
        partial = target.parent / f"{target.name}.{os.getpid()}.partial"
        try:
            files.make_dir(target.parent)
            files.write_text(partial, json.dumps(content, indent=1))
            files.publish(partial, target)
            return target.path
        except OSError:
            continue
    return None


def read_records(root: Path, kind: str) -> list[dict[str, Any]]:
    """Every readable record of a cache directory, in the order of their names."""
    records: list[dict[str, Any]] = []
    # A record is shown and never run, so it does not matter who wrote it.
    files, folder = StoreFiles(), Place.of(root, Trust.ANYBODY) / kind
    with suppress(OSError, ValueError):
        names = [name for name in files.names(folder) if name.endswith(".json")]
        found = (files.read_json(folder / name) for name in names)
        records.extend(record for record in found if isinstance(record, dict))
    return records
