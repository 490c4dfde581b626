"""Compile cache, CUDA extension build, no-compile guard and warm-up plan. Imports no framework and
no compiler.
"""

from __future__ import annotations

from .cache import CompileCache, default_cache
from .guard import no_compile
from .key import CompileKey
from .manifest import Artefact

__all__ = ["Artefact", "CompileCache", "CompileKey", "default_cache", "no_compile"]
