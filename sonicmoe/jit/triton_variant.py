"""A Triton kernel's entry in a warm-up plan: describes it without importing Triton."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .cache import CompileCache
from .key import CompileKey
from .manifest import Artefact


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
        """The published artefact, built if needed; errors as `CompileCache.build`."""
        artefact: Artefact = self._request().compile(cache)
        return artefact

    def _request(self) -> Any:
        # Imported here, so that listing a plan needs neither Triton nor a framework.
        module, _, function = self.entry.partition(":")
        return getattr(importlib.import_module(module), function)(
            **dict(self.statics), arch=self.arch
        )
