"""Nothing of a run is lost by accident."""

from __future__ import annotations

import pytest

from ernie_compat.run_report import clear, open_directory
from sonicmoe.errors import ConfigError


def test_a_new_directory_is_made_where_none_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = open_directory(None, False)
    assert directory.is_dir() and directory.parent.name == "runs"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be a directory"):
        open_directory(tmp_path / "file", False)


@pytest.mark.parametrize("left", ["checkpoint.npz", "metrics.jsonl"])
def test_a_run_is_kept_until_it_is_cleared(tmp_path, left):
    assert open_directory(tmp_path, False) == tmp_path
    (tmp_path / left).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds a run; --resume continues it"):
        open_directory(tmp_path, False)
    assert open_directory(tmp_path, True) == tmp_path
    (tmp_path / "mine.txt").touch()
    (tmp_path / "captured-step300-layer2.npz").touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
