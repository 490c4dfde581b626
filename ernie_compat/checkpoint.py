"""One-file checkpoints: arrays by name and a JSON header in an uncompressed `.npz`, published by
rename.

Batches depend on (seed, step) only and the model draws no random numbers, so seed and step are the
whole random state.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.errors import SonicMoEError, expect
from sonicmoe.npz import NpzError, read_npz

FORMAT = 1
HEADER = "header"


class CheckpointError(SonicMoEError, ValueError):
    """A checkpoint is missing, damaged, or belongs to another model."""


def save_checkpoint(
    path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write so that `path` always holds a whole checkpoint, the old one or the new one, even after
    a power cut. CheckpointError where the directory cannot be written.
    """
    encoded = json.dumps({"format": FORMAT, **header}).encode()
    # An .npz holds arrays only, so the JSON text travels as an array of bytes.
    named: dict[str, Any] = {HEADER: np.frombuffer(encoded, dtype=np.uint8), **arrays}
    # Written beside `path`, on the same file system, because only there a rename is atomic. The
    # file is flushed first: a rename may reach the disk before the data it names.
    temporary = partial_of(path)
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


def partial_of(path: Path) -> Path:
    """The name under which this process writes a file before it publishes it as `path`."""
    # Of this process alone: two that write to one name would publish a mixture.
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")


def read_header(path: Path) -> dict[str, Any]:
    """The header alone; reads no weight. CheckpointError where there is no checkpoint at `path`, it
    is damaged, or of an unknown format.
    """
    return _read(path, header_only=True)[0]


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`(header, arrays)` as given to `save_checkpoint`. Errors as `read_header`."""
    return _read(path, header_only=False)


def require_matching_arrays(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Check names, shapes and dtypes of saved arrays against those of the model. CheckpointError
    names the first array that is missing, unknown, or of another shape or dtype.
    """
    for name, shape in wanted.items():
        words = f"checkpoint has no array {name!r}; the model needs one of shape {tuple(shape)}"
        expect(name in arrays, CheckpointError, words)
        found = tuple(arrays[name].shape)
        words = f"checkpoint array {name!r} has shape {found}; the model needs {tuple(shape)}"
        expect(found == tuple(shape), CheckpointError, words)
        dtype = arrays[name].dtype
        words = f"checkpoint array {name!r} has dtype {dtype}; the model needs float32"
        expect(dtype == np.float32, CheckpointError, words)
    unknown = next((name for name in arrays if name not in wanted), None)
    words = f"checkpoint array {unknown!r} has no place in the model"
    expect(unknown is None, CheckpointError, words)


def require_finite_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that arrays of numbers out of `path` hold no NaN and no infinity. CheckpointError names
    the first array that does.
    """
    for name, array in arrays.items():
        count = int(array.size - np.isfinite(array).sum())
        words = (
            f"checkpoint {path}, array {name!r}: {count} of {array.size} values are not finite; "
        )
        way_out = "resume from an earlier copy, or go on with --allow-nonfinite"
        expect(count == 0, CheckpointError, words + way_out)


def _read(path: Path, header_only: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    # Asked first, because "there is no checkpoint yet" and "it is damaged" call for other remedies.
    expect(os.path.lexists(path), CheckpointError, f"no checkpoint at {path}")
    try:
        arrays = read_npz(path, lambda names: [HEADER] if header_only else names)
        header = json.loads(arrays.pop(HEADER).tobytes())
    # JSON that is nested a thousand levels deep overflows the parser's stack.
    except (NpzError, KeyError, ValueError, RecursionError) as error:
        reason = f"no {HEADER}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"checkpoint {path} is damaged or no checkpoint: {reason}") from None
    found = header.get("format") if isinstance(header, dict) else None
    words = f"checkpoint {path} has format {found!r}; this version reads format {FORMAT}"
    expect(found == FORMAT, CheckpointError, words)
    return header, arrays
