"""Python processes of fresh interpreters, with text output and no input.

None of them is forked from a process that has imported a framework. PyTorch's and Paddle's threads
do not survive a fork, and a world of ranks that were forked so hangs now and then as it ends.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from sonicmoe.jit.child import search_path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


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


def of_checkout(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the checkout, with the caller's environment and these variables. It can
    import the checkout's packages and test helpers, and all that this process can.
    """
    path = os.pathsep.join((str(ROOT), str(TESTS), search_path()))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    return run(arguments, env, ROOT, timeout=600)


def program(name: str) -> ModuleType:
    """A script of tools/ as a module of this process, where dataclasses find it."""
    path = ROOT / "tools" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
