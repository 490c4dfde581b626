"""The recipes of CONTRIBUTING.md, carried out on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import processes
from processes import ROOT

COPIED = ("sonicmoe", "ernie_compat", "tests", "docs", "benchmarks", "tools")
TIMEOUT_S = 600
SINGLE_FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")
# Compiled Python files come along: each names the size and the time of its source, so that a file
# which a step changes is compiled anew, and only that one.
NOT_COPIED = shutil.ignore_patterns("*.png", "data")


@dataclass(frozen=True)
class Step:
    """A block of code under a line that is the path of a file: the whole file, or a change of it
    (`diff`: kept lines, added ones and removed ones, found by their text).
    """

    path: str
    language: str
    code: str


def steps(recipe: str) -> list[Step]:
    """Every step of a recipe; a block without a path of its own belongs to the path before it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^### {recipe}\n(.*?)(?=^##|\Z)", text, flags=re.M | re.S)
    found, path = [], ""
    for named, language, code in re.findall(
        r"^(?:`([\w./]+)`:\n|```(\w+)\n(.*?)^```)", section, flags=re.M | re.S
    ):
        path = named or path
        if language:
            found.append(Step(path, language, code))
    assert found, f"{recipe} has no steps"
    return found


def copy_of_the_tree(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
    for name in SINGLE_FILES:
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def carry_out(step: Step, tree: Path) -> None:
    """Write the file of a step, or change it; a change must fit at exactly one place."""
    path = tree / step.path
    if step.language != "diff":
        assert not path.exists(), f"{step.path} is there already"
        path.write_text(step.code, encoding="utf-8")
        return
    lines = step.code.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{step.path} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python on the copy: `sonicmoe`, `ernie_compat` and the tests come from there."""
    return processes.run(arguments, environment_of(tree), tree, timeout=TIMEOUT_S)


def environment_of(tree: Path) -> dict[str, str]:
    path = os.pathsep.join((str(tree), str(tree / "tests")))
    return {**os.environ, "PYTHONPATH": path}


def pytest_on(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest with these arguments on the copy, in a process that has PyTorch imported and nothing of
    this package.
    """
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return processes.run([*options, *arguments], environment_of(tree), tree, timeout=TIMEOUT_S)


def passes(tree: Path, *arguments: str) -> None:
    """pytest with these arguments succeeds on the copy."""
    result = pytest_on(tree, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
