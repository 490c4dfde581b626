"""Compiled kernels inside the installed package, which `make wheel` puts there.

They are trusted as the package is: whoever can write there can change its Python files too. So
nobody asks for owners and modes here, and nothing here is copied into a cache, where it would pass
for a build of that cache's owner. A kernel is found by its key, whichever compiler built it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .key import CompileKey, host_abi, package_versions
from .manifest import Artefact

FOLDER = Path(__file__).resolve().parents[1] / "carried"
INDEX = "index.json"
LOADER = "apache-tvm-ffi"


@dataclass(frozen=True)
class Carried:
    """A folder of carried kernels.

    Attributes:
        versions: of the loader, the compiler and the ABI, by name.
        contents: the activations for which there are kernels, by precision.
        left_out: a line for each part that is not inside, with the reason.
        manifests: by the family of the key, the key's record and the facts of the files.
    """

    folder: Path
    versions: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, list[str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    manifests: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def architectures(self) -> list[str]:
        return sorted({manifest["key"]["arch"] for manifest in self.manifests.values()})

    def find(self, key: CompileKey) -> Artefact | None:
        """The artefact of `key`, or None. Nothing is verified: a damaged file does not load."""
        manifest = self.manifests.get(key.family)
        if manifest is None:
            return None
        return Artefact(key, self.folder / key.kernel / key.family, manifest)

    @property
    def misfit(self) -> str:
        """Why none of the kernels is found in this environment, and what to install; or ""."""
        there = {"abi": host_abi(), **dict(package_versions(LOADER))}
        for name, found in there.items() if self.manifests else ():
            built_for = self.versions[name]
            if found != built_for:
                remedy = f"; pip install {LOADER}=={built_for}" if name == LOADER else ""
                words = f"the kernels of this package are built for {name} {built_for}"
                return f"{words}, and here it is {found}{remedy}"
        return ""

    def shortfall(self, arch: str) -> str:
        """Why a kernel for `arch` is not among these, and what to install; "" where the package
        carries none at all.
        """
        if not self.manifests or self.misfit:
            return self.misfit
        if arch not in self.architectures:
            here = ", ".join(self.architectures)
            return f"the kernels of this package are for {here}: install a CUDA toolkit for {arch}"
        return (
            f"it is not among the kernels of this package ({self.summary}): install a CUDA toolkit"
        )

    @property
    def summary(self) -> str:
        """The activations by precision, in one line."""
        return "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in self.contents.items())


def carried() -> Carried:
    """The kernels of this installation."""
    return read(FOLDER)


@functools.cache
def read(folder: Path) -> Carried:
    """The list of a folder; an empty one where there is none. ValueError or KeyError where it is
    damaged, as a damaged module of the package would raise.
    """
    try:
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Carried(folder)
    manifests = {CompileKey.from_record(each["key"]).family: each for each in listed["artefacts"]}
    return Carried(
        folder, listed["versions"], listed["contents"], tuple(listed["left_out"]), manifests
    )
