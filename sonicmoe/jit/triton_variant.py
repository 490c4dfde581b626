"""A Triton kernel's entry in a warm-up plan: describes it without importing Triton."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cache import CompileCache
from .child import run_build_script
from .key import CompileKey
from .manifest import Artefact
from .store import SCRATCH


@dataclass(frozen=True)
class TritonVariant:
    """One specialisation of a Triton kernel.

    Attributes:
        name: for progress and messages.
        entry: "package.module:function"; called with `statics` and `arch`, returns
            `kernel.ahead(...)`.
        statics: keyword arguments of the entry. Never a token count.
        arch: for example "sm_90a".
        effort_s: as of `CudaSource`.
    """

    name: str
    entry: str
    statics: tuple[tuple[str, Any], ...]
    arch: str
    effort_s: float = field(default=5.0, compare=False)

    @classmethod
    def make(cls, name: str, entry: str, statics: Mapping[str, Any], arch: str) -> TritonVariant:
        """The same with a mapping of statics."""
        return cls(name, entry, tuple(sorted(statics.items())), arch)

    def key(self) -> CompileKey:
        """The compile key; imports Triton and the module of `entry`."""
        key: CompileKey = self._request().key()
        return key

    def compile(self, cache: CompileCache) -> Artefact:
        """The published artefact, built if needed; errors as `CompileCache.build`, and CompileError of
        Triton.
        """
        return cache.build(self.key(), self._build_into)

    def _build_into(self, folder: Path) -> None:
        """Build in a process of its own, because Triton compiles one kernel at a time in a process."""
        scratch = folder / SCRATCH
        scratch.mkdir()
        request = {**asdict(self), "folder": str(folder), "build_directory": str(scratch)}
        run_build_script(self.name, Path(__file__).with_name("triton_build.py"), request, {})

    def _request(self) -> Any:
        # Imported here, so that listing a plan needs neither Triton nor a framework.
        module, _, function = self.entry.partition(":")
        return getattr(importlib.import_module(module), function)(
            **dict(self.statics), arch=self.arch
        )


def build(request: Mapping[str, Any]) -> None:
    """What the process of `_build_into` does: leave all outputs of Triton in `request["folder"]`."""
    statics = {name: _hashable(value) for name, value in request["statics"]}
    made = TritonVariant.make(request["name"], request["entry"], statics, request["arch"])
    made._request().build_into(Path(request["folder"]))


def _hashable(value: Any) -> Any:
    """Tuples again where JSON has made lists of them."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
