"""The gate: when all variants of the kernels are due, and what ends it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import ROOT


@pytest.fixture
def due(tmp_path, monkeypatch):
    """`kernels_due.reason` over a repository of two commits, and its caches."""
    monkeypatch.setenv("SONICMOE_TEST_CACHE", str(tmp_path / "caches"))
    monkeypatch.delenv("SONICMOE_CI_BASE", raising=False)
    monkeypatch.syspath_prepend(ROOT / "tools" / "ci")
    import kernels_due

    repository = tmp_path / "repository"
    (repository / "sonicmoe" / "kernels").mkdir(parents=True)
    (repository / "pyproject.toml").touch()
    monkeypatch.setattr(kernels_due, "ROOT", repository)
    monkeypatch.setattr(kernels_due, "DECIDING", ("sonicmoe/kernels", "pyproject.toml"))

    def commit(**files):
        for name, text in files.items():
            (repository / "sonicmoe" / "kernels" / name).write_text(text)
            (repository / name).write_text(text)
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["add", "-A"], [*who, "commit", "-qm", "."]):
            subprocess.run(["git", *command], cwd=repository, check=True)

    subprocess.run(["git", "init", "-qb", "main"], cwd=repository, check=True)
    kernels_due.commit, kernels_due.repository = commit, repository
    return kernels_due


def test_kernels_are_due_where_they_changed_or_nobody_knows(due):
    assert due.reason() == "nobody can say what this change started from"
    due.commit(kernel="1")
    assert due.reason() == "nobody can say what this change started from"
    due.commit(kernel="2")
    assert due.reason().startswith("kernels, the tables")
    (due.repository / "page").write_text("words")
    due.commit()
    assert due.reason() is None
    # A branch counts from where it left, and what is not committed counts too.
    subprocess.run(["git", "checkout", "-qb", "branch"], cwd=due.repository, check=True)
    due.commit(kernel="3")
    (due.repository / "page").write_text("other words")
    due.commit()
    assert due.reason().startswith("kernels, the tables")
    (due.repository / "sonicmoe" / "kernels" / "kernel").write_text("2")
    assert due.reason() is None


def test_kernels_are_due_where_those_of_some_state_are_at_hand(due, monkeypatch):
    due.commit(kernel="1")
    due.commit(page="words")
    monkeypatch.setattr(due, "find_toolkit", lambda: None)
    assert due.main() == 1
    due.kept.passed_states().mkdir(parents=True)
    (due.kept.passed_states() / due.state()).touch()
    assert due.reason() == "artefacts of all variants are at hand"
    due.commit(kernel="2")
    due.commit(page="other words")
    assert due.reason() == "other kernels or tools passed on this machine before"


# `make` writes down what a stage found, and fails where it is asked to.
MAKE = """#!/bin/sh
case "$*" in kernels*) name=kernels;; *) name=tests;; esac
echo '{"counts": {"passed": 3}, "seconds": 1.5, "not_run": []}' > "$SONICMOE_TEST_RESULTS/$name.json"
case "$*" in $FAILS) exit 2;; esac
"""


@pytest.mark.parametrize(
    ("due", "fails", "code", "passed"),
    [
        (False, "nothing", 0, 3),
        (True, "nothing", 0, 6),
        (True, "test*", 2, 3),
        (True, "kernels*worksteal", 2, 6),
        (True, "*every-variant", 2, 6),
    ],
)
def test_the_gate_runs_what_is_due_and_ends_with_the_counts(tmp_path, due, fails, code, passed):
    files = {
        ".ci/run": (ROOT / ".ci/run").read_text(),
        "tests/results.py": (ROOT / "tests/results.py").read_text(),
        "bin/make": MAKE,
        ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "tools/ci/kernels_due.py": f"raise SystemExit({int(not due)})\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FAILS": fails}
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == f"{passed} passed in 1.50s"
