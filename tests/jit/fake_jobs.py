"""Compile jobs for warm-up tests: picklable, with a fake compiler."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from racer import FakeCompiler, make_key

from sonicmoe.jit import Artefact, CompileCache, CompileKey


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
        print("a compiler that talks")  # must not disturb the worker's answers
        return cache.build(self.key(), FakeCompiler(self.key(), self.log, self.seconds))


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
    def compile(self, cache: CompileCache) -> Artefact:
        os._exit(41)


class UnsendableJob(FakeJob):
    def __reduce__(self) -> tuple[()]:
        raise ValueError("this job stays here")
