"""Notes in a cache directory on what a warm-up covered, each a small JSON file. People read them; no
kernel is loaded because of one.
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

_FOLDER = "warmed"


def write_record(cache: CompileCache, name: str, content: dict[str, Any]) -> Path | None:
    """Write a record beside the artefacts, or on this node where the cache directory is read-only or
    full. None where neither takes it.
    """
    files = StoreFiles()
    for place in cache.places:
        target = place / _FOLDER / f"{name}.json"
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


def read_records(root: Path) -> list[dict[str, Any]]:
    """Every readable record of a cache directory, in the order of their names."""
    records: list[dict[str, Any]] = []
    # A record is shown and never run, so it does not matter who wrote it.
    files, folder = StoreFiles(), Place.of(root, Trust.ANYBODY) / _FOLDER
    with suppress(OSError, ValueError):
        names = [name for name in files.names(folder) if name.endswith(".json")]
        found = (files.read_json(folder / name) for name in names)
        records.extend(record for record in found if isinstance(record, dict))
    return records
