"""Fixtures of the compile-cache tests; what this machine cannot run is said at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_jobs import FakeJob
from racer import FakeCompiler, make_key
from racers import NOT_RUN, Field

from sonicmoe.jit import CompileCache, CompileKey, reader


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if NOT_RUN in reason:
            terminalreporter.write_line(f"{report.nodeid}: {reason}", yellow=True, bold=True)


@pytest.fixture(scope="session")
def mounts() -> None:
    """Skips where a process may not have mounts of its own: real read-only and full file systems."""
    line = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    allowed = shutil.which("unshare") and subprocess.run(line, capture_output=True, check=False)
    if not allowed or allowed.returncode != 0:
        pytest.skip(f"{NOT_RUN}no permission to mount; the same faults are injected in other tests")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of flushes would take minutes on a disk."""
    place = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=place if os.access(place, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def publications_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "VISIBILITY_TIMEOUT_S", 0.1)


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path)


@pytest.fixture
def cache(field: Field) -> CompileCache:
    return CompileCache(field.root, field.local, lock_timeout_s=5)


@pytest.fixture
def key() -> CompileKey:
    return make_key()


@pytest.fixture
def compiler(field: Field) -> Callable[..., FakeCompiler]:
    return lambda key, **options: FakeCompiler(key, field.log, **options)


@pytest.fixture
def own_caches(field: Field, monkeypatch: pytest.MonkeyPatch) -> Field:
    """Empty ones, for commands: this machine's own may be warm."""
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(field.root))
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(field.local))
    return field


@pytest.fixture
def jobs(field: Field) -> Callable[[int], list[FakeJob]]:
    """Of fake kernels, numbered from 1."""
    return lambda count: [FakeJob(size, field.log) for size in range(1, count + 1)]
