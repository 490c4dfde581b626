"""One writer at a time, whose claim dies with it; nothing of a run is lost by accident."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ernie_compat.checkpoint import partial_of
from ernie_compat.run_directory import (
    HOLDER_NAME,
    claimed,
    clear,
    found_run,
    make_new,
    require_free,
)
from sonicmoe.errors import ConfigError


def in_a_child(directory: Path, ending: str) -> int:
    """The exit status of a forked process that claims the directory and then ends; -1: refused."""
    child = os.fork()
    if child == 0:
        try:
            with claimed(directory):
                if ending == "killed":
                    (directory / ".checkpoint.npz.host-1.partial").write_text("half")
                    os.kill(os.getpid(), signal.SIGKILL)
        except ConfigError:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_second_process_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with claimed(tmp_path):
        assert in_a_child(tmp_path, "done") == 2
        refused = rf"is in use by process {os.getpid()} on \S+ since 20\d\d-\S+Z; wait for its end"
        with pytest.raises(ConfigError, match=refused), claimed(tmp_path):
            pytest.fail("held twice")
    assert in_a_child(tmp_path, "done") == 0
    assert not (tmp_path / HOLDER_NAME).exists()


def test_a_killed_process_holds_nothing_and_its_leftovers_go(tmp_path: Path) -> None:
    assert in_a_child(tmp_path, "killed") == -signal.SIGKILL
    assert (tmp_path / HOLDER_NAME).exists() and list(tmp_path.glob(".*.partial"))
    with claimed(tmp_path):
        assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("note", ["", "[]", "null", "[" * 5000, '{"pid": "x"}'])
def test_a_damaged_note_costs_the_name_alone(tmp_path: Path, note: str) -> None:
    with claimed(tmp_path):
        (tmp_path / HOLDER_NAME).write_text(note)
        with pytest.raises(ConfigError, match="is in use by another process"), claimed(tmp_path):
            pass


def test_without_locks_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("ernie_compat.run_directory.FileLock.acquire", no_locks)
    with claimed(tmp_path):
        pass
    assert re.search(r"cannot be locked \(.*No locks available\)", caplog.text)


def test_two_runs_that_start_in_one_second_get_two_directories(tmp_path: Path) -> None:
    assert len({make_new(tmp_path / "runs") for _ in range(5)}) == 5
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give --out DIR"):
        make_new(tmp_path / "file")


def test_what_is_there_is_named(tmp_path: Path) -> None:
    assert found_run(tmp_path) is None
    require_free(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("no record\nnor this\n")
    with pytest.raises(ConfigError, match=r"a metrics\.jsonl that cannot be read; --overwrite"):
        require_free(tmp_path)
    (tmp_path / "checkpoint.npz").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"a checkpoint\.npz that cannot be read; --resume"):
        require_free(tmp_path)
    (tmp_path / "mine.txt").touch()
    (tmp_path / "captured-step300-layer2.npz").touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_partial_files_of_two_processes_have_two_names(tmp_path: Path) -> None:
    names = {partial_of(tmp_path / "checkpoint.npz")}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(partial_of(tmp_path / "checkpoint.npz")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    names.add(Path(os.read(reading, 4096).decode()))
    assert len(names) == 2 and all(name.parent == tmp_path for name in names)
