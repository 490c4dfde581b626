"""One writer at a time, whose claim dies with it; nothing of a run is lost by accident."""

from __future__ import annotations

import re
import signal

import pytest
from small_run import run_python

from ernie_compat.run_directory import claimed, clear, found_run, opened, require_free
from sonicmoe.errors import ConfigError

CLAIMS = """
import os, signal, sys
from pathlib import Path
from ernie_compat.run_directory import opened
from sonicmoe.errors import ConfigError
directory = Path(sys.argv[1])
try:
    with opened(directory, 0, False):
        if sys.argv[2] == "killed":
            (directory / ".checkpoint.npz.host-1.partial").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
except ConfigError:
    sys.exit(2)
"""


def in_a_child(directory, ending):
    """The exit code of a process that claims the directory and then ends; 2: refused."""
    return run_python(["-c", CLAIMS, str(directory), ending]).returncode


def test_a_second_process_is_refused(tmp_path):
    with claimed(tmp_path):
        assert in_a_child(tmp_path, "done") == 2
        refused = "is in use by another run; wait for its end"
        with pytest.raises(ConfigError, match=refused), claimed(tmp_path):
            pytest.fail("held twice")
    assert in_a_child(tmp_path, "done") == 0


def test_a_killed_process_holds_nothing_and_its_leftovers_go(tmp_path):
    assert in_a_child(tmp_path, "killed") == -signal.SIGKILL
    assert list(tmp_path.glob(".*.partial"))
    with opened(tmp_path, 0, False):
        assert not list(tmp_path.glob(".*.partial"))


def test_without_locks_the_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    def no_locks(*_, **__):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("ernie_compat.run_directory.try_lock", no_locks)
    with claimed(tmp_path):
        pass
    assert re.search(r"cannot be locked \(.*No locks available\)", caplog.text)


def test_a_new_directory_is_made_where_none_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(None, 0, False) as directory:
        assert directory.is_dir() and directory.parent.name == "runs"
    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match="cannot be a directory")
    with refused, opened(tmp_path / "file", 0, False):
        pytest.fail("made")
    with opened(tmp_path / "other rank's", 1, False) as directory:
        assert not directory.exists()


def test_what_is_there_is_named(tmp_path):
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
