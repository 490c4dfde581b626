"""One-file checkpoints: arrays by name and a JSON header in an uncompressed `.npz`, published by
rename.

Batches depend on (seed, step) only and the model draws no random numbers, so seed and step are the
whole random state.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.errors import SonicMoEError, expect

FORMAT = 1
HEADER = "header"


class CheckpointError(SonicMoEError, ValueError):
    """A checkpoint is missing, damaged, or belongs to another model."""


def save_checkpoint(
    path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write so that `path` always holds a whole checkpoint, the old one or the new one, even after
    a power cut.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    encoded = json.dumps({"format": FORMAT, **header}).encode()
    # An .npz holds arrays only, so the JSON text travels as an array of bytes.
    named: dict[str, Any] = {HEADER: np.frombuffer(encoded, dtype=np.uint8), **arrays}
    # Written beside `path`, on the same file system, because only there a rename is atomic. The
    # file is flushed first: a rename may reach the disk before the data it names.
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(file, **named)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # also Ctrl-C: a partial checkpoint can be as large as the disk
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
        raise


def read_header(path: Path) -> dict[str, Any]:
    """The header alone; reads no weight.

    Raises:
        CheckpointError: there is no checkpoint at `path`, it is damaged, or of an unknown format.
    """
    return _read(path, header_only=True)[0]


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`(header, arrays)` as given to `save_checkpoint`.

    Raises:
        CheckpointError: see `read_header`.
    """
    return _read(path, header_only=False)


def require_matching_arrays(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Check names and shapes of saved arrays against those of the model.

    Raises:
        CheckpointError: naming the first array that is missing, unknown or of another shape.
    """
    for name, shape in wanted.items():
        expect(
            name in arrays,
            CheckpointError,
            f"checkpoint has no array {name!r}; the model needs one of shape {tuple(shape)}",
        )
        found = tuple(arrays[name].shape)
        expect(
            found == tuple(shape),
            CheckpointError,
            f"checkpoint array {name!r} has shape {found}; the model needs {tuple(shape)}",
        )
    unknown = next((name for name in arrays if name not in wanted), None)
    expect(
        unknown is None, CheckpointError, f"checkpoint array {unknown!r} has no place in the model"
    )


def _read(path: Path, header_only: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    expect(path.is_file(), CheckpointError, f"no checkpoint at {path}")
    try:
        # Pickles run code when they are read, and a checkpoint may come from somebody else.
        with np.load(path, allow_pickle=False) as archive:
            # np.load reads members on demand: the header costs one small read, however large the
            # weights are.
            header = json.loads(archive[HEADER].tobytes())
            names = [] if header_only else [name for name in archive.files if name != HEADER]
            arrays = {name: archive[name] for name in names}
    # Each way of damaging a file (cut, overwritten, another format) ends in another of these.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"checkpoint {path} is damaged or no checkpoint: {error}") from None
    found = header.get("format") if isinstance(header, dict) else None
    expect(
        found == FORMAT,
        CheckpointError,
        f"checkpoint {path} has format {found!r}; this version reads format {FORMAT}",
    )
    return header, arrays
