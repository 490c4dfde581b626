"""Fixtures of the compile-cache tests; what this machine cannot run is said at the end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import NOT_RUN, Field
from racer import FakeCompiler, make_key

from sonicmoe.jit import CompileCache, CompileKey

WITH_MOUNTS = ("unshare", "-m", "sh", "-c")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if NOT_RUN in reason:
            terminalreporter.write_line(f"{report.nodeid}: {reason}", yellow=True, bold=True)


@pytest.fixture(scope="session")
def mounts() -> tuple[str, ...]:
    """A command prefix that runs a shell line in a mount namespace of its own: real read-only and
    full file systems.
    """
    allowed = shutil.which("unshare") and subprocess.run(
        [*WITH_MOUNTS, "mount -t tmpfs -o size=64k none /mnt"], capture_output=True, check=False
    ).returncode == 0  # fmt: skip
    if not allowed:
        pytest.skip(f"{NOT_RUN}no permission to mount; the same faults are injected in other tests")
    return WITH_MOUNTS


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path)


@pytest.fixture
def cache(field: Field) -> CompileCache:
    return CompileCache(field.root, field.local, lock_timeout_s=5, visibility_timeout_s=0.2)


@pytest.fixture
def key() -> CompileKey:
    return make_key()


@pytest.fixture
def compiler(field: Field) -> Callable[..., FakeCompiler]:
    return lambda key, **options: FakeCompiler(key, field.log, **options)
