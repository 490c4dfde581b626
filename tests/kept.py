"""What tests compile stays in the user's cache directory, so that the next run compiles it only where
its sources or tools changed: `SONICMOE_TEST_CACHE`, or `sonicmoe-tests` among the user's caches.

`CompileCache` keeps it, whose own tests have private directories: an artefact appears whole by one
rename, one of several runs builds it, and a damaged one is built anew. Run this file to remove all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

import sonicmoe.jit
from sonicmoe.jit import CompileCache, CompileKey
from sonicmoe.jit.key import host_abi, package_versions, source_fingerprint
from sonicmoe.jit.toolchain import find_toolkit

TESTS = Path(__file__).parent
# nvcc calls it as its host compiler.
HOST_COMPILER = TESTS / "kernels" / "host_compiler.sh"
LONGEST_BUILD_S = 1800.0


def directory() -> Path:
    """Where artefacts of every state of the tools lie."""
    given = os.environ.get("SONICMOE_TEST_CACHE")
    return (Path(given) if given else user_cache_path("sonicmoe-tests")) / "artefacts"


def passed_states() -> Path:
    """A file for each state of the kernels whose variants all passed on this machine."""
    return directory() / "passed"


@cache
def host_compilers() -> str:
    """Versions of the host's compilers, of which no key of the package knows."""
    asked = ([name, "--version"] for name in ("gcc", "g++") if shutil.which(name))
    return "".join(subprocess.check_output(line, text=True) for line in asked)


@cache
def tools() -> str:
    """A digest of what compiles besides the compilers that keys name: their host compiler, and this
    package's code that calls them.
    """
    own = sorted(Path(sonicmoe.jit.__file__).parent.glob("*.*"))
    digest = hashlib.sha256(host_compilers().encode())
    for file in (HOST_COMPILER, *own):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def open_cache(local: Path) -> CompileCache:
    """The kept artefacts; where the directory cannot be written, those of this run in `local`."""
    os.environ["NVCC_CCBIN"] = str(HOST_COMPILER)
    place = directory() / tools()
    return CompileCache(place, local, lock_timeout_s=LONGEST_BUILD_S)


def key_of(name: str, sources: Iterable[Path], *facts: object, arch: str = "sm_90a") -> CompileKey:
    """The key of what a test makes of `sources`, of the headers that they include in quotes, and of
    `facts`, by the host's compilers.
    """
    toolkit = find_toolkit()
    return CompileKey.make(
        name,
        arch=arch,
        statics={"facts": hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()},
        fingerprint={
            "sources": source_fingerprint(sources),
            "abi": host_abi(),
            **dict(package_versions("apache-tvm-ffi")),
        },
        toolchain={"cuda": toolkit.version if toolkit else "none", "tools": tools()},
    )


def shared_object(
    cache: CompileCache, name: str, source: Path | str, *flags: str, headers: Iterable[Path] = ()
) -> Path:
    """`name.so`, which g++ makes of a C++ file, or of a text that includes some of `headers`."""
    files = [source] if isinstance(source, Path) else []
    text = [] if files else [source]
    key = key_of(name, [*files, *headers], *text, *_without_folders(flags))

    def build(folder: Path) -> None:
        compile_shared(folder / f"{name}.so", source, *flags)

    return cache.build(key, build).file(f"{name}.so")


def compile_shared(library: Path, source: Path | str, *flags: str) -> None:
    """Compile a C++ file, or a text, with the host's compiler."""
    given = ["-x", "c++", "-"] if isinstance(source, str) else [str(source)]
    text = source if isinstance(source, str) else None
    command = ["g++", "-fPIC", "-shared", "-w", *flags, "-o", str(library), *given]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _without_folders(flags: Iterable[str]) -> list[str]:
    """Another checkout has other folders of headers, whose texts count and whose places do not."""
    return [flag for flag in flags if not flag.startswith("-I")]


if __name__ == "__main__":
    print(f"removing {directory()}")
    shutil.rmtree(directory(), ignore_errors=True)
