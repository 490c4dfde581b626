"""Which framework a command runs on, and how a process is bound to it.

The rule is in `choose`, for every command that computes something. Importing this module imports no
framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .errors import FrameworkError, expect
from .host import install_hint, too_old

FRAMEWORKS = ("torch", "paddle")
AUTO = "auto"
# A machine of Paddle's GPU build often has PyTorch too, because quack-kernels requires it. Paddle's
# CPU build, beside PyTorch, is there for tests.
RULE = "Paddle where its GPU build (paddlepaddle-gpu) is installed, else PyTorch, else Paddle"
_PADDLE_GPU = "paddlepaddle-gpu"


class FrameworkMissingError(FrameworkError):
    """No framework is installed, or not the one that was asked for. `what`: in words; `remedy`: how
    to install it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy

    def __reduce__(self) -> tuple[type[FrameworkMissingError], tuple[str, str]]:
        """Processes hand exceptions to each other."""
        return type(self), (self.what, self.remedy)


@dataclass(frozen=True)
class FrameworkChoice:
    """A framework and the reason for it, in words. `other`: installed too, where nobody asked for
    one by name.
    """

    name: str
    reason: str
    other: str | None = None


def choose(requested: str | None = None) -> FrameworkChoice:
    """The framework that a command runs on: the one asked for, else by `RULE`. A process that runs
    this package on a framework already stays with it. FrameworkMissingError where it is not
    installed, or none is.

    requested: "torch", "paddle", or "auto" or None for the rule.
    """
    if requested not in (None, AUTO):
        assert requested is not None
        if not is_importable(requested):
            what = f"{requested} is not installed in this Python ({sys.executable})"
            raise FrameworkMissingError(what, install_hint(requested))
        return FrameworkChoice(requested, "asked for")
    bound = _bound()
    if bound is not None:
        return FrameworkChoice(bound, "this process runs on it already")
    found = [name for name in FRAMEWORKS if is_importable(name)]
    if not found:
        hints = ", or ".join(map(install_hint, FRAMEWORKS))
        raise FrameworkMissingError("neither PyTorch nor Paddle is installed", hints)
    if len(found) == 1:
        return FrameworkChoice(found[0], "the only one installed")
    # Both are here. The other one is named, because a user may have meant it.
    name, other = FRAMEWORKS if not _is_installed(_PADDLE_GPU) else FRAMEWORKS[::-1]
    return FrameworkChoice(name, f"both are installed; --framework {other} takes the other", other)


def is_importable(name: str) -> bool:
    """Whether an import would find `name`: not a bare directory of that name, nor one switched off
    in `sys.modules`.
    """
    try:
        # A directory without `__init__.py` on the module path is a namespace package to Python: it
        # is found, and has no origin.
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    except ValueError:
        return sys.modules.get(name) is not None


def _is_installed(distribution: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(distribution))
    return False


def _bound() -> str | None:
    """The framework that `sonicmoe` runs on in this process; None before the first import that
    binds it.
    """
    interop = sys.modules.get("sonicmoe.interop")
    return None if interop is None else str(interop.FRAMEWORK)


def load(name: str, *, hidden: str | None = None) -> None:
    """Import "torch" or "paddle" and bind this process's `sonicmoe` to it; does nothing the second
    time. FrameworkError where it cannot be imported, is a Paddle without the torch proxy, or this
    process already runs `sonicmoe` on the other one; OSError or RuntimeError where one of its shared
    libraries is broken.

    hidden: a module that the import of the framework must not find.
    """
    if _bound() is None:
        _import(name, hidden)
    bound = importlib.import_module("sonicmoe.interop").FRAMEWORK
    words = f"this process already runs sonicmoe on {bound}; {name} needs a process of its own"
    expect(bound == name, FrameworkError, words)


def _import(name: str, hidden: str | None) -> None:
    with warnings.catch_warnings(), _hidden(hidden):
        # Paddle warns about a missing ccache whenever it is imported.
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            words = f"{name} cannot be imported ({error}); {install_hint(name)}"
            raise FrameworkError(words) from None
    if name == "paddle":
        if not hasattr(module, "enable_compat"):
            raise FrameworkError(too_old(module.__version__))
        # Before any module of the package imports torch; the binding is fixed from then on. Limited
        # to imports made by `sonicmoe`, so that other packages of the process get the real PyTorch.
        module.enable_compat(scope={"sonicmoe"}, silent=True)


@contextmanager
def _hidden(name: str | None) -> Iterator[None]:
    """Have imports fail as if a module were not installed, unless it is loaded already."""
    if name is None or name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(name, None)
