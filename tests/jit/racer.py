"""A key and a compiler that stand for real ones, and one process of a race for an artefact.

The compiler appends a line to a log, so that builds can be counted whatever becomes of the process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sonicmoe.jit import Artefact, CompileCache, CompileKey

ARTEFACT_BYTES = 4096


def make_key(size: int = 1, arch: str = "sm_90a", compiler: str | None = "1") -> CompileKey:
    return CompileKey.make(
        "fake", arch=arch, statics={"H": size}, fingerprint={"sources": "0"},
        toolchain=None if compiler is None else {"cc": compiler},
    )  # fmt: skip


def content_of(key: CompileKey, count: int = ARTEFACT_BYTES) -> bytes:
    return (key.family.encode() * (count // len(key.family) + 1))[:count]


class FakeCompiler:
    """Writes an artefact in two halves, `seconds` apart, and counts itself in `log`."""

    def __init__(
        self,
        key: CompileKey,
        log: Path,
        seconds: float = 0.0,
        count: int = ARTEFACT_BYTES,
        own_words: bool = False,
    ):
        self.key, self.log, self.seconds = key, log, seconds
        self.count, self.own_words = count, own_words

    def __call__(self, folder: Path) -> None:
        with open(self.log, "a") as handle:
            handle.write(f"{self.key.statics[0][1]} {os.getpid()}\n")
        content, half = content_of(self.key, self.count), self.count // 2
        try:
            with open(folder / "kernel.so", "wb", buffering=0) as handle:
                written = handle.write(content[:half])
                time.sleep(self.seconds)
                written += handle.write(content[half:])
            if written != self.count:
                raise RuntimeError("short write")
        except (OSError, RuntimeError):
            if self.own_words:
                raise RuntimeError("fatal error: error writing to kernel.so") from None
            raise


def load(artefact: Artefact) -> int:
    content = artefact.file("kernel.so").read_bytes()
    wanted = content_of(artefact.key, len(content))
    assert content == wanted, "the artefact is not what its key says"
    return len(content)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def race(
    root: Path,
    local: Path,
    log: Path,
    *,
    size: int = 1,
    seconds: float = 0.0,
    count: int = ARTEFACT_BYTES,
    own_words: bool = False,
    timeout: float = 60.0,
    go: Path | None = None,
) -> dict[str, Any]:
    """Build one key; what happened. go: a file whose appearance is waited for."""
    cache = CompileCache(root, local, lock_timeout_s=timeout)
    key = make_key(size)
    compiler = FakeCompiler(key, log, seconds, count, own_words)
    if go is not None:
        wait_for(go)
    started = time.monotonic()
    try:
        loaded = cache.get(key, compiler, load)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    artefact = cache.try_load(key)
    path = str(artefact.path) if artefact else None
    return {"bytes": loaded, "path": path, "seconds": time.monotonic() - started}
