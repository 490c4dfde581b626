"""Python processes of fresh interpreters, with text output and no input.

None of them is forked from a process that has imported a framework. PyTorch's and Paddle's threads
do not survive a fork, and a world of ranks that were forked so hangs now and then as it ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def start(arguments: Iterable[object], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    """`python ARGUMENTS`: a script, `-m module` or `-c program`, and what follows."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=env, cwd=cwd, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(
    arguments: Iterable[object], env: dict[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """One process to its end; it is killed after `timeout` seconds, with TimeoutExpired."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=env, cwd=cwd, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
