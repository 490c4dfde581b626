"""`read_npz` gives what numpy stored, or one error. tests/damage.py has the systematic attacks."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sonicmoe import npz
from sonicmoe.npz import NpzError, read_npz, require_numbers

ARRAYS = {
    "fp32": np.array([[np.nan, -0.0], [1e-45, 3.4e38]], dtype=np.float32),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.float16),
    "text": np.array("é"),
    "big endian": np.arange(3, dtype=">i4"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_back_bit_for_bit_and_can_be_written(tmp_path: Path, save: object) -> None:
    save(tmp_path / "a.npz", **ARRAYS)  # type: ignore[operator]
    found = read_npz(tmp_path / "a.npz")
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes() and found[name].flags.writeable
    assert list(read_npz(tmp_path / "a.npz", lambda names: ["text"])) == ["text"]


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, words in (
        (tmp_path / "fifo", "no regular file"),
        (tmp_path, "no regular file"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path / "none", "No such file"),
        (Path("a\0b"), "NUL"),
    ):
        with pytest.raises(NpzError, match=words):
            read_npz(path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(NpzError, match="Object arrays"):
        read_npz(tmp_path / "a.npz", lambda names: ["x"])


@pytest.mark.parametrize("count", [1, 8])
def test_arrays_larger_than_the_memory_are_not_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    arrays = {f"x{number}": np.zeros((1 << 20) // count) for number in range(count)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    monkeypatch.setattr(npz, "host_memory", lambda: 2 << 20)
    with pytest.raises(NpzError, match="larger than the memory"):
        read_npz(tmp_path / "a.npz")
    assert read_npz(tmp_path / "a.npz", lambda names: list(names)[1:2]).keys() <= {"x1"}


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(1))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive, pytest.warns(UserWarning):
        archive.writestr("x.npy", b"")
    with pytest.raises(NpzError, match="there twice"):
        read_npz(tmp_path / "a.npz")


def test_numbers_are_asked_for_by_name() -> None:
    require_numbers({"x": np.zeros(1), "ids": np.zeros(1, dtype=np.int32)}, integers=("ids",))
    for arrays in ({"ids": np.zeros(1)}, {"x": np.array("a")}, {"x": np.zeros(1, dtype=complex)}):
        with pytest.raises(NpzError, match="needed: "):
            require_numbers(arrays, integers=("ids",))
