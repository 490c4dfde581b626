"""Exceptions of the compile cache. Each message says which kernel and key, what happened, and what
to do.
"""

from __future__ import annotations

from ..errors import SonicMoEError


class CompileError(SonicMoEError, RuntimeError):
    """A kernel could not be compiled; the message ends with the compiler's own words."""


class ToolchainError(CompileError):
    """A compile is needed and the compiler is not on this machine."""


class CompileForbiddenError(CompileError):
    """A compile was needed where `no_compile()` or SONIC_MOE_FORBID_COMPILE=1 promised that none
    would be.
    """


class CompileLockTimeout(CompileError, TimeoutError):
    """Another process has been building the same kernel for longer than the bounded wait; the
    message names it.
    """


class KeyFieldError(SonicMoEError, ValueError):
    """A compile key was given a bad name, or a value without a stable spelling."""


class PackError(SonicMoEError, ValueError):
    """A pack of kernels cannot be made, is damaged, or is not for this installation."""


class CacheUnwritableError(SonicMoEError, RuntimeError):
    """Neither the cache directory nor its node-local fallback can take an artefact."""


class ArtefactLoadError(SonicMoEError, RuntimeError):
    """An intact artefact cannot be loaded on this machine."""
