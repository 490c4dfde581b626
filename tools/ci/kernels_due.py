#!/usr/bin/env python3
"""Whether `make kernels` is due: exit code 0 and the reason, or 1 where nothing can have changed.

    tools/ci/kernels_due.py             # .ci/run asks
    tools/ci/kernels_due.py --passed    # `make kernels` says that it passed: this state, on this machine

It is due where this machine has the artefacts of all variants of this state, because it then takes
a minute; where kernels, the tables of engines that choose them, or the toolchain differ from what
the change started from; and where nobody can say what that was.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import kept  # noqa: E402

from sonicmoe.jit.key import package_versions  # noqa: E402
from sonicmoe.jit.toolchain import find_toolkit  # noqa: E402

# What decides which kernels there are, their machine code, and what is refused of it.
DECIDING = (
    *("sonicmoe/kernels", "sonicmoe/jit", "sonicmoe/enums.py", "sonicmoe/architectures.py"),
    *(f"sonicmoe/engine/{name}.py" for name in ("capabilities", "compile_plan", "kernel_jobs")),
    # Triton's interpreter runs their host code beside the kernels.
    *("sonicmoe/engine/triton.py", "sonicmoe/routing/backends.py"),
    *("tests/kernels", "tests/kept.py", "pyproject.toml"),
)
PACKAGES = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "quack-kernels", "triton")
STARTS = ("origin/HEAD", "origin/main", "main")


def git(*arguments: str) -> str | None:
    """What git prints, or None where it fails or is not here."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def start() -> str | None:
    """The commit that this change started from: where it left the main branch, or the first parent."""
    given = os.environ.get("SONICMOE_CI_BASE")
    if given:
        return git("rev-parse", "--verify", f"{given}^{{commit}}")
    head = git("rev-parse", "HEAD")
    left = (git("merge-base", "HEAD", name) for name in STARTS)
    return next((base for base in left if base and base != head), git("rev-parse", "HEAD^1"))


def state() -> str:
    """A digest of the deciding files, as they are, and of the tools."""
    toolkit = find_toolkit()
    digest = hashlib.sha256(repr((toolkit and toolkit.version, kept.tools())).encode())
    digest.update(repr(package_versions(*PACKAGES)).encode())
    for name in DECIDING:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def reason() -> str | None:
    """Why it is due, or None."""
    passed = {path.name for path in kept.passed_states().glob("*")}
    if state() in passed:
        return "artefacts of all variants are at hand"
    if passed:
        return "other kernels or tools passed on this machine before"
    base = start()
    if base is None:
        return "nobody can say what this change started from"
    if git("diff", "--quiet", base, "--", *DECIDING) is None:
        return f"kernels, the tables that choose them, or their tools differ from {base[:12]}"
    return None


def main() -> int:
    """Say it, or remember that it passed."""
    if find_toolkit() is None:
        print("NOT RUN on this machine: `make kernels` needs nvcc")
        return 1
    if sys.argv[1:] == ["--passed"]:
        kept.passed_states().mkdir(parents=True, exist_ok=True)
        (kept.passed_states() / state()).touch()
        return 0
    found = reason()
    print(
        f"make kernels: {found}"
        if found
        else "NOT RUN here, but by `make kernels`: no kernel changed"
    )
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
