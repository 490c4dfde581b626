"""Other copies of this package and of quack that an import may reach instead of the right one.
Imports none of them.

Distributions that bring sonicmoe and quack along inside their own package (Paddle's
`paddlefleet_ops` does) leave two of each in one process: modules of both mix where either is
imported by its short name.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import __version__
from ..engine.capabilities import BF16

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
CARRIERS = ("paddlefleet_ops",)
QUACK = "quack-kernels"


@dataclass(frozen=True)
class Copy:
    """A package found: the name it is imported by, its version ("unknown" where it does not say),
    where, and whether it is loaded.
    """

    name: str
    version: str
    path: Path
    loaded: bool

    def __str__(self) -> str:
        """`paddlefleet_ops.sonicmoe 0.3 from /path (loaded)`."""
        state = "loaded" if self.loaded else "importable"
        return f"{self.name} {self.version} from {self.path} ({state})"


def other_copies() -> list[Copy]:
    """Every other sonicmoe: loaded under any name, or inside a carrier."""
    return [copy for copy in _copies_of("sonicmoe") if copy.path != PACKAGE_ROOT]


def installed_otherwise() -> str | None:
    """The version that the environment says is installed, where it is not the one that runs."""
    try:
        installed = version("sonicmoe")
    except PackageNotFoundError:
        return None
    return installed if installed != __version__ else None


def wrong_quacks() -> list[Copy]:
    """Every quack of another version than the GEMMs need, loaded or carried."""
    needed = dict(BF16.packages)[QUACK]
    return [copy for copy in _copies_of("quack") if copy.version != needed]


def _copies_of(name: str) -> list[Copy]:
    """All packages of that name, each place once; one that is loaded says so."""
    found = {copy.path: copy for copy in (*_carried(name), *_loaded(name))}
    return [copy for _, copy in sorted(found.items())]


def _carried(name: str) -> Iterator[Copy]:
    """`carrier.name` for carriers that an import would find: looked up as files, as importing one
    loads its libraries.
    """
    for carrier in CARRIERS:
        try:
            # `find_spec` of a top-level name imports nothing. Importing a carrier would load its
            # CUDA libraries into the process that is being examined.
            spec = importlib.util.find_spec(carrier)
        except ValueError:  # a module without a spec
            continue
        for place in (spec.submodule_search_locations or []) if spec else []:
            path = Path(place, name).resolve()
            if (path / "__init__.py").is_file():
                yield Copy(f"{carrier}.{name}", _version_of(path), path, loaded=False)


def _loaded(name: str) -> Iterator[Copy]:
    # A copy of the dictionary, because other threads may import meanwhile.
    for module_name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # transformers has a plain module of that name, which loads kernels.
        is_package = hasattr(module, "__path__")
        if file and is_package and module_name.rpartition(".")[2] == name:
            path = Path(file).resolve().parent
            says = getattr(module, "__version__", None)
            yield Copy(module_name, str(says) if says else _version_of(path), path, loaded=True)


def _version_of(path: Path) -> str:
    """The version that a package's source states, or "unknown"."""
    source = path / "__init__.py"
    text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
    # Read from the text: importing a second copy would mix the two.
    match = re.search(r"^__version__\s*=\s*[\"']([^\"']+)", text, flags=re.MULTILINE)
    return match.group(1) if match else "unknown"
