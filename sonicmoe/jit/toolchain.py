"""Finds nvcc and its version. Runs nvcc once a process."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..log import log_once

# Of NVIDIA's installer, of conda, and of the packages on PyPI.
_LIBRARIES = ("lib64", "lib", "targets/x86_64-linux/lib")
_PREFIXES = (Path("/usr/local/cuda"),)


@dataclass(frozen=True)
class CudaToolkit:
    """An installed CUDA toolkit: its home, its nvcc and the version of nvcc ("13.0.88")."""

    home: Path
    nvcc: Path
    version: str

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, to compare."""
        return tuple(int(part) for part in self.version.split("."))

    @property
    def static_runtime(self) -> Path | None:
        """The CUDA runtime as a static library, or None where the toolkit came without it."""
        found = (self.home / folder / "libcudart_static.a" for folder in _LIBRARIES)
        return next((path for path in found if path.is_file()), None)


def find_toolkit() -> CudaToolkit | None:
    """The toolkit of CUDA_HOME, else of CUDA_PATH, else of the `nvcc` on PATH, else in the
    customary place, or None. A warning tells where a variable names another place.
    """
    return _find_toolkit(
        os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), os.environ.get("PATH", "")
    )


# The variables are the arguments, so a changed environment is looked at again and an unchanged one
# never starts nvcc twice.
@functools.lru_cache(maxsize=8)
def _find_toolkit(cuda_home: str | None, cuda_path: str | None, path: str) -> CudaToolkit | None:
    on_path = shutil.which("nvcc", path=path)
    homes = [Path(text) for text in (cuda_home, cuda_path) if text]
    if on_path:
        homes += [home for home in [_home_of(Path(on_path))] if home]
    for home in [*homes, *_PREFIXES]:
        # An nvcc without a readable version counts as absent: the version is part of compile keys,
        # and a guess would mix artefacts of two compilers.
        nvcc = home / "bin" / "nvcc"
        version = _version_of(nvcc) if os.access(nvcc, os.X_OK) else None
        if version:
            named = cuda_home or cuda_path
            if named and home != Path(named):
                words = "CUDA_HOME or CUDA_PATH is %s, which has no nvcc that answers; that of %s compiles"
                log_once(logging.WARNING, words, named, str(home))
            return CudaToolkit(home, nvcc, version)
    return None


def _home_of(nvcc: Path) -> Path | None:
    """The toolkit of an nvcc, as nvcc itself names it: the one on PATH may be a wrapper script far
    from its toolkit.
    """
    match = re.search(
        r"^#\$ TOP=(.+)$", _run(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE
    )
    return Path(match[1].strip()).resolve() if match else None


def _version_of(nvcc: Path) -> str | None:
    match = re.search(r"\bV(\d+\.\d+\.\d+)", _run(nvcc, "--version"))
    return match[1] if match else None


def _run(*command: str | Path) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
