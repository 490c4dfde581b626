"""A checkpoint is whole or absent, and says what is wrong with it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ernie_compat import checkpoint
from ernie_compat.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_header,
    require_matching_arrays,
    save_checkpoint,
)

ARRAYS = {
    "main/weight/x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "main/steps/x": np.float32(3) * np.ones(()),
}


def test_round_trip_is_exact(tmp_path):
    path = tmp_path / "made" / "checkpoint.npz"
    odd = {"w": np.array([np.nan, -0.0, 1e-45, 3.4e38], dtype=np.float32), **ARRAYS}
    save_checkpoint(path, {"step": 3, "config": {"a": [1]}}, odd)
    header, arrays = load_checkpoint(path)
    assert (header["step"], header["config"]) == (3, {"a": [1]})
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in odd.items()
    }
    assert read_header(path) == header
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("moment", ["while writing", "before the rename"])
def test_a_failure_keeps_the_old_checkpoint(tmp_path, monkeypatch, moment):
    path = tmp_path / "checkpoint.npz"
    save_checkpoint(path, {"step": 1}, ARRAYS)
    before = path.read_bytes()

    def fail_half_way(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    def killed(source, target):
        raise KeyboardInterrupt

    if moment == "while writing":
        monkeypatch.setattr(checkpoint.np, "savez", fail_half_way)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(path, {"step": 2}, ARRAYS)
    else:
        monkeypatch.setattr(checkpoint.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, {"step": 2}, ARRAYS)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_unknown_format_is_named(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.npz"
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    save_checkpoint(path, {}, ARRAYS)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 99"):
        read_header(path)


def zeros(**shapes):
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (zeros(b=(2,)), "no array 'a'"),
        (zeros(a=(3, 2), b=(2,)), r"'a' has shape \(3, 2\); the model needs \(2, 3\)"),
        ({**zeros(a=(2, 3)), "b": np.zeros(2)}, "'b' has dtype float64; the model needs float32"),
        (zeros(a=(2, 3), b=(2,), c=(1,)), "'c' has no place"),
    ],
)
def test_mismatching_arrays_are_named(arrays, message):
    with pytest.raises(CheckpointError, match=message):
        require_matching_arrays(arrays, {"a": (2, 3), "b": (2,)})
