"""The wheel has every module and kernel source of the two packages, and nothing beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sonicmoe", "ernie_compat")


def files_of(tree: Path) -> set[str]:
    found = (path for package in PACKAGES for path in (tree / package).rglob("*"))
    return {
        str(path.relative_to(tree))
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }


def test_what_a_user_runs_is_installed(tmp_path: Path) -> None:
    tree, built = tmp_path / "tree", tmp_path / "built"
    for name in ("benchmarks", "tests", *PACKAGES):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in built.iterdir()) == sorted(PACKAGES)
    assert files_of(built) == files_of(ROOT)
