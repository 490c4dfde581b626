"""Fixtures of the training tests. Processes of Paddle and worlds of ranks are run once for all
parallel workers of a run.
"""

from __future__ import annotations

import json

import pytest
from filelock import FileLock
from small_run import run_program, write_text

from ernie_compat.corpus import load_corpus


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


@pytest.fixture
def corpus(text):
    return load_corpus([text])


@pytest.fixture(scope="session")
def in_paddle(session_folder):
    """`in_paddle(name, program)`: what a program prints as JSON, in a process of its own that runs
    once. Its arguments are a text and an empty directory.
    """

    def ran(name, program):
        folder = session_folder / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                found = run_program(program, str(write_text(folder / "text")), str(folder))
                (folder / "found.json").write_text(json.dumps(found))
        if not (folder / "found.json").exists():
            pytest.fail(f"the program of {name} failed before")
        return json.loads((folder / "found.json").read_text())

    return ran
