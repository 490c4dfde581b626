"""`tools/ci/gpu_tests_alone.py`: every group in a process and caches of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "ci" / "gpu_tests_alone.py"
TESTS = """
import os
from pathlib import Path

import pytest

seen = []


def leave_and_find():
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "kernel"
    found = cache.exists() or bool(seen)
    cache.write_text("compiled")
    seen.append(1)
    return found


class TestAlone:
    def test_finds_nothing(self):
        assert not leave_and_find()


def test_needs_what_another_left():
    assert leave_and_find()


@pytest.mark.skip(reason="needs nothing")
def test_skipped():
    pass
"""


def run(tmp_path, *options):
    file = tmp_path / "test_sample.py"
    file.write_text(TESTS)
    command = [sys.executable, str(TOOL), "--root", str(tmp_path), *options, file.name]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_test_that_leans_on_another_fails_alone(tmp_path):
    result = run(tmp_path, "--jobs", "2")
    assert result.returncode == 1, result.stderr
    lines = [line.split()[0] for line in result.stdout.splitlines() if " s  " in line]
    assert lines == ["passed", "failed", "skipped"]
    assert "3 groups in" in result.stdout and "1 passed, 1 skipped, 1 failed" in result.stdout


IDS = ["f.py::A::test[x]", "f.py::A::test[y::z]", "f.py::test[a::b]", "g.py::test"]


@pytest.mark.parametrize(
    "by,groups",
    [("test", IDS), ("class", ["f.py::A", "f.py::test", "g.py::test"]), ("file", ["f.py", "g.py"])],
)
def test_groups(by, groups):
    specification = importlib.util.spec_from_file_location("gpu_tests_alone", TOOL)
    tool = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = tool  # which dataclasses look into
    specification.loader.exec_module(tool)
    assert tool.grouped(IDS, by) == groups
