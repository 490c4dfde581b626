"""What tests compile is kept: found again, made anew where a text changed or a file broke, and there is
a rule for when all variants of the kernels are due.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import kept
import pytest
from processes import ROOT, of_checkout

from sonicmoe.jit import CompileCache

TEXT = '#include "number.hpp"\nextern "C" int number() { return NUMBER; }\n'


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_library_is_built_once_and_anew_where_a_header_changed_or_the_file_broke(
    tmp_path, monkeypatch
):
    cache, header = CompileCache(tmp_path / "kept", tmp_path / "local"), tmp_path / "number.hpp"
    built = []
    compile_shared = kept.compile_shared

    def counting(library, *arguments):
        built.append(library)
        compile_shared(library, *arguments)

    monkeypatch.setattr(kept, "compile_shared", counting)

    def number(value):
        header.write_text(f"#define NUMBER {value}\n")
        flags = f"-I{tmp_path}", "-O1"
        library = kept.shared_object(cache, "number", TEXT, *flags, headers=[header])
        return ctypes.CDLL(str(library)).number(), library

    first, library = number(1)
    assert (first, number(1)[0], len(built)) == (1, 1, 1)
    assert (number(2)[0], number(1)[0], len(built)) == (2, 1, 2)
    with library.open("ab") as file:
        file.write(b"broken")
    assert (number(1)[0], len(built)) == (1, 3)


def test_the_directory_moves_by_a_variable_and_only_what_is_in_it_is_removed(tmp_path):
    beside = tmp_path / "somebody's"
    (tmp_path / "artefacts" / "made").mkdir(parents=True)
    beside.touch()
    program = ROOT / "tests" / "kept.py"
    done = of_checkout(program, SONICMOE_TEST_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [beside]


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


def test_kernels_are_due_where_their_artefacts_are_at_hand_or_those_of_another_state(
    due, monkeypatch
):
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


def test_a_run_writes_down_how_it_ended(tmp_path):
    (tmp_path / "found").mkdir()
    case = tmp_path / "test_one.py"
    case.write_text("def test_one(): pass\ndef test_two(): assert False\n")
    ini = ["-c", ROOT / "pyproject.toml", "-p", "conftest", "--confcutdir", ROOT / "tests"]
    done = of_checkout(
        *("-m", "pytest", "-n", "0", *ini, "-m", "not kernels", case),
        SONICMOE_TEST_RESULTS=str(tmp_path / "found"), SONICMOE_TEST_STAGE="mine",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    said = subprocess.run(
        [sys.executable, ROOT / "tests" / "results.py", tmp_path / "found"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert said[0].startswith("NOT RUN here, but by `make kernels`")
    assert said[-1].startswith("1 failed, 1 passed in ")


class TestTheGate:
    """`.ci/run` over a `make` that only writes down what a stage found."""

    MAKE = """#!/bin/sh
echo "make $*" >> asked
case "$*" in kernels*) name=kernels;; *) name=tests;; esac
echo '{"counts": {"passed": 3}, "seconds": 1.5, "not_run": []}' > "$SONICMOE_TEST_RESULTS/$name.json"
case "$*" in $FAILS) exit 2;; esac
"""

    @pytest.fixture
    def gate(self, tmp_path):
        for name in (".ci/run", "tests/results.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
        for name, text in (
            ("bin/make", self.MAKE),
            (".venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        (tmp_path / "tools" / "ci").mkdir(parents=True)

        def run(due, **variables):
            (tmp_path / "tools/ci/kernels_due.py").write_text(f"raise SystemExit({int(not due)})\n")
            env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FAILS": "nothing", **variables}
            done = subprocess.run(
                ["bash", ".ci/run"],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            return (
                done.returncode,
                done.stdout.splitlines(),
                (tmp_path / "asked").read_text().splitlines(),
            )

        return run

    def test_runs_what_is_due_and_ends_with_the_counts(self, gate):
        code, said, asked = gate(due=False)
        assert (code, said[-1], asked) == (0, "3 passed in 1.50s", ["make test ALSO=doors"])
        code, said, asked = gate(due=True)
        assert (code, said[-1]) == (0, "6 passed in 1.50s")
        assert [line.split()[1] for line in asked[1:]] == ["test", "kernels", "kernels"]

    @pytest.mark.parametrize("fails", ["test*", "kernels*worksteal", "*every-variant"])
    def test_a_stage_that_fails_is_its_exit_code(self, gate, fails):
        code, said, _ = gate(due=True, FAILS=fails)
        assert code == 2 and said[-1].endswith("passed in 1.50s")
