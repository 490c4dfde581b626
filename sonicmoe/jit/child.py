"""Running a build script in a process of its own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from .errors import CompileError

BUILD_TIMEOUT_S = 1800
_LOG_TAIL = 6000


def run_build_script(
    name: str, script: Path, request: dict[str, Any], environment: dict[str, str]
) -> str:
    """Run `script` on `request`, whose "build_directory" it works in; returns what it printed.
    CompileError, with the last lines printed, where it failed or took longer than half an hour.

    The script sees this process's module search path, and `environment` on top of this process's.
    """
    # A file, because command lines have a limit and show up in `ps`.
    path = Path(request["build_directory"]) / "request.json"
    path.write_text(json.dumps(request), encoding="utf-8")
    try:
        # Standard error goes into the same pipe, so the log keeps the order in which compiler and
        # linker wrote. stdin is closed, because a tool that asks a question would wait for ever.
        done = subprocess.run(
            [sys.executable, "-P", str(script), str(path)], env={**os.environ, "PYTHONPATH": search_path(), **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=BUILD_TIMEOUT_S, check=False, umask=share(path.parent),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        # `subprocess.run` has killed the child by now. Its output is lost, so the message has none.
        raise CompileError(f"{name}: the build did not end within {BUILD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        words = f"{name} did not compile (exit status {done.returncode})"
        raise CompileError(f"{words}:\n{done.stdout[-_LOG_TAIL:]}")
    return done.stdout


def search_path() -> str:
    """This process's module search path, for the environment of a child."""
    # "" in sys.path is the current directory of this process. `-P` keeps the script's own directory
    # out of the child's path, where `key.py` or `lock.py` could hide modules of the same names.
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def share(folder: Path) -> int:
    """The umask of a build in `folder`; -1 keeps that of this process.

    In a cache that a group shares, another member has to be able to remove what a killed build
    leaves, down to its intermediate files.
    """
    if not folder.parent.stat().st_mode & stat.S_IWGRP:
        return -1
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXG)
    return 0o002
