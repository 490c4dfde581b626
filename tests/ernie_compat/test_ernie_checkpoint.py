"""A checkpoint is whole or absent, says what is wrong with it, and is read or refused in one line
whatever a disk or a stranger has changed.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from click.testing import CliRunner
from damage import NESTED, variants
from small_run import run_config

from ernie_compat import checkpoint
from ernie_compat.checkpoint import (
    CheckpointError,
    SavedRun,
    load_checkpoint,
    read_header,
    require_matching_arrays,
    save_checkpoint,
)
from ernie_compat.train_command import train
from ernie_compat.trainer import Trainer
from sonicmoe.errors import SonicMoEError

CHANGED = {"precision": "bf16", "compare": True, "train": {"lr": 0.25}, "capture_layers": (1,)}
RUN = SavedRun(3, run_config(**CHANGED), "digest", ("/a", "/b"))
ARRAYS = {
    "main/weight/x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "main/steps/x": np.float32(3) * np.ones(()),
}


def test_round_trip_is_exact(tmp_path):
    path = tmp_path / "made" / "checkpoint.npz"
    odd = {"w": np.array([np.nan, -0.0, 1e-45, 3.4e38], dtype=np.float32), **ARRAYS}
    save_checkpoint(path, RUN, odd)
    header, arrays = load_checkpoint(path)
    assert header == RUN == read_header(path)
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in odd.items()
    }
    assert os.listdir(path.parent) == [path.name]


def fail_half_way(file, **arrays):
    file.write(b"half")
    raise OSError(28, "No space left on device")


def killed(source, target):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "fails", "raises"),
    [
        ("np.savez", fail_half_way, pytest.raises(CheckpointError, match="No space left")),
        ("os.replace", killed, pytest.raises(KeyboardInterrupt)),
    ],
    ids=["while writing", "before the rename"],
)
def test_a_failure_keeps_the_old_checkpoint(tmp_path, monkeypatch, place, fails, raises):
    path = tmp_path / "checkpoint.npz"
    save_checkpoint(path, RUN, ARRAYS)
    before = path.read_bytes()
    monkeypatch.setattr(f"ernie_compat.checkpoint.{place}", fails)
    with raises:
        save_checkpoint(path, RUN, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def zeros(**shapes):
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (zeros(b=(2,)), r"first in \['a'\]"),
        (zeros(a=(3, 2), b=(2,)), r"'a' is float32 of shape \(3, 2\); .* float32 of \(2, 3\)"),
        (zeros(a=(2, 3), b=(2,), c=(1,)), r"first in \['c'\]"),
    ],
)
def test_mismatching_arrays_are_named(arrays, message):
    with pytest.raises(CheckpointError, match=message):
        require_matching_arrays(arrays, {"a": (2, 3), "b": (2,)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of a run of two steps."""
    place = tmp_path_factory.mktemp("run")
    (place / "text").write_text("the router picks " * 100)
    corpus = checkpoint.load_corpus([place / "text"])
    Trainer.start(run_config(precision="bf16", train={"steps": 2}), corpus, place).train()
    return place / "checkpoint.npz"


def test_a_damaged_checkpoint_is_read_or_refused(saved, tmp_path, request):
    header, arrays = load_checkpoint(saved)
    # A few of the arrays, because every case reads all of them.
    kept = {name: arrays[name] for name in sorted(arrays)[::12]}
    path = tmp_path / "checkpoint.npz"
    save_checkpoint(path, header, kept)
    shapes = {name: array.shape for name, array in kept.items()}
    count, refused = request.config.getoption("--attacks"), 0
    for kind, content in variants(path.read_bytes(), 1, count):
        path.write_bytes(content)
        try:
            require_matching_arrays(load_checkpoint(path)[1], shapes)
        except SonicMoEError as error:
            refused += 1
            assert str(error).strip(), kind
    # A bit that no reader looks at, or two arrays of one shape that changed places.
    assert refused > count / 2


HEAD = "main/weight/lm_head.weight"
# Changes of a header or of arrays after which a file is sound and the checkpoint is none of a run.
FOREIGN = {
    "text step": lambda header, arrays: header.update(step="two"),
    "negative step": lambda header, arrays: header.update(step=-1),
    "null config": lambda header, arrays: header.update(config=None),
    "text size": lambda header, arrays: header["config"]["model"].update(hidden_size="32"),
    "size for a supercomputer": lambda header, arrays: header["config"]["model"].update(hidden_size=2**40),
    "layers without end": lambda header, arrays: header["config"]["model"].update(num_layers=10**20),
    "infinite schedule": lambda header, arrays: header["config"]["train"].update(min_lr_ratio=float("inf")),
    "data of numbers": lambda header, arrays: header.update(data=[1]),
    "text that is gone": lambda header, arrays: header.update(data=["/no/such/text"]),
    "other dtype": lambda header, arrays: arrays.update({HEAD: arrays[HEAD].astype("f8")}),
    "arrays of text": lambda header, arrays: arrays.update({HEAD: arrays[HEAD].astype("U8")}),
    "no moments": lambda header, arrays: arrays.pop("main/moment1/lm_head.weight", None),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_resuming_a_foreign_checkpoint_is_one_line(saved, tmp_path, monkeypatch, kind):
    run, arrays = load_checkpoint(saved)
    write = checkpoint.json.dumps

    def changed(header):
        FOREIGN[kind](header, arrays)
        return write(header)

    monkeypatch.setattr(checkpoint.json, "dumps", changed)
    save_checkpoint(tmp_path / "unused.npz", run, {})  # changes the arrays
    save_checkpoint(tmp_path / "checkpoint.npz", run, arrays)
    monkeypatch.undo()
    result = CliRunner().invoke(train, ["--resume", "--out", str(tmp_path)])
    line = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert "checkpoint" in line or "memory" in line
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "content", [NESTED, "", "null", "[]", "{", '{"format": 2, "step": 1}', '{"format": 99}']
)
def test_a_header_that_is_none_of_a_run_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr("ernie_compat.checkpoint.json.dumps", lambda _: content)
    save_checkpoint(tmp_path / "checkpoint.npz", RUN, {})
    monkeypatch.undo()
    words = "format 99" if "99" in content else r"checkpoint\.npz"
    with pytest.raises(SonicMoEError, match=words):
        read_header(tmp_path / "checkpoint.npz")
