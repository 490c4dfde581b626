"""Compile jobs for warm-up tests, with a fake compiler."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from racer import FakeCompiler, make_key

from sonicmoe.engine import compile_plan
from sonicmoe.jit import Artefact, CompileCache, CompileKey
from sonicmoe.jit.child import run_build_script


@dataclass(frozen=True)
class FakeJob:
    size: int
    log: Path
    seconds: float = 0.0

    @property
    def effort_s(self) -> float:
        return self.seconds

    @property
    def name(self) -> str:
        return f"fake_{self.size}"

    def key(self) -> CompileKey:
        return make_key(self.size)

    def compile(self, cache: CompileCache) -> Artefact:
        return cache.build(self.key(), FakeCompiler(self.key(), self.log, self.seconds))


def every_model_needs(jobs: Iterable[FakeJob], patch: pytest.MonkeyPatch) -> None:
    """Make these jobs the kernels of every model."""
    patch.setattr(compile_plan, "RECORDS", {})
    sources = tuple(lambda arch, job=job: job for job in jobs)
    patch.setattr(compile_plan, "EVERY_RUN", sources)


class TimedJob(FakeJob):
    """Notes when its compile began and ended, so that tests see what ran at the same time."""

    def compile(self, cache: CompileCache) -> Artefact:
        began = time.monotonic()
        artefact = super().compile(cache)
        with open(self.log.with_suffix(".times"), "a") as handle:
            handle.write(f"{began} {time.monotonic()}\n")
        return artefact


class FailingJob(FakeJob):
    def compile(self, cache: CompileCache) -> Artefact:
        raise ValueError("expected ';'")


class DyingJob(FakeJob):
    """Its compiler ends without a word."""

    def compile(self, cache: CompileCache) -> Artefact:
        return cache.build(self.key(), self._build_into)

    def _build_into(self, folder: Path) -> None:
        script = folder / "script.py"
        script.write_text("import os; os._exit(41)")
        run_build_script(self.name, script, {"build_directory": str(folder)}, {})
