"""The examination behind `sonicmoe doctor`: versions, framework, device, engine, caches, flags,
self-test, and the problems found.

Imports no framework: `examine` chooses one, loads it, and only then imports the half that computes
(`selftest`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import (
    DIRECTORY,
    FLAGS,
    HONOURED_VARIABLES,
    Flag,
    ResolvedConfig,
    spelling,
    unknown_flags,
)
from ..engine.capabilities import BF16
from ..enums import EngineName
from ..errors import ConfigError, FrameworkError, SonicMoEError
from ..install import NVIDIA_DRIVER, install_hint
from ..jit.warmup import read_records
from .copies import PACKAGE_ROOT, QUACK, installed_otherwise, other_copies, wrong_quacks

if TYPE_CHECKING:
    from .selftest import Device, TensorCheck

DISTRIBUTIONS = (
    "torch", "paddlepaddle", "paddlepaddle-gpu", "triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy",
)  # fmt: skip
PRECISIONS = ("bf16", "fp8")
LOW_SPACE_BYTES = 1 << 30


class Severity(Enum):
    """An `ERROR` is a failed check (exit code 1); a `WARNING` is worth a look."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """One finding and what to do about it, a line each."""

    severity: Severity
    what: str
    remedy: str


@dataclass(frozen=True)
class FlagState:
    """A flag in force. `value` is as one would type it; `source` is "environment" or "default"."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class CacheState:
    """A cache directory. `writable` and `free_bytes` are those of the nearest existing parent while
    it does not exist.

    `warmed` says what complete warm-ups recorded there: one line a model, with the versions that
    compiled it.
    """

    role: str
    path: str
    exists: bool
    writable: bool
    size_bytes: int
    free_bytes: int
    warmed: tuple[str, ...] = ()


@dataclass
class Report:
    """Everything on the doctor's screen. A field that could not be found out is None or empty, and
    `problems` says why.

    engines: "able", or why this machine cannot run it, by engine and whatever the model.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    package_path: str = str(PACKAGE_ROOT)
    framework: str | None = None
    framework_reason: str = ""
    device: Device | None = None
    engine: str | None = None
    engine_reason: str = ""
    engines: dict[str, str] = field(default_factory=dict)
    caches: list[CacheState] = field(default_factory=list)
    flags: list[FlagState] = field(default_factory=list)
    honoured: dict[str, str | None] = field(default_factory=dict)
    unknown_flags: dict[str, str | None] = field(default_factory=dict)
    self_test: list[TensorCheck] = field(default_factory=list)
    self_test_seconds: float | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return not any(problem.severity is Severity.ERROR for problem in self.problems)

    def error(self, what: str, remedy: str) -> None:
        """Record a failed check."""
        self.problems.append(Problem(Severity.ERROR, what, remedy))

    def warning(self, what: str, remedy: str) -> None:
        """Record something worth a look."""
        self.problems.append(Problem(Severity.WARNING, what, remedy))


def examine(framework: str = "auto", environ: Mapping[str, str] | None = None) -> Report:
    """Look at this process's environment, load a framework, run the self-test. Never raises for
    what it finds.

    Args:
        framework: "torch", "paddle" or "auto" (see `choose_framework`).
        environ: the variables to examine; default `os.environ`.
    """
    environ = os.environ if environ is None else environ
    report = Report(versions=installed_versions())
    examine_copies(report)
    # Everything up to here works without a framework, so a broken installation still gets a report
    # of its flags and caches.
    config = examine_flags(report, environ)
    examine_variables(report, environ)
    examine_caches(report, config)
    name = choose_framework(report, framework)
    if name is not None and load_framework(report, name):
        examine_engine(report, config)
    return report


def installed_versions() -> dict[str, str | None]:
    """Installed versions by distribution name, None where absent; reads metadata, imports nothing."""
    found: dict[str, str | None] = {"python": platform.python_version(), "sonicmoe": __version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def examine_copies(report: Report) -> None:
    """Warn of other copies of this package, and of quacks that its GEMMs are not made for."""
    for copy in other_copies():
        report.warning(
            f"there is another sonicmoe: {copy}",
            f"this one is {__version__} from {PACKAGE_ROOT}; import `sonicmoe` before the package that brings the other, or take "
            "the other off the module path",
        )
    installed = installed_otherwise()
    if installed:
        report.warning(
            f"sonicmoe {installed} is installed, but {__version__} runs from {PACKAGE_ROOT}",
            "install this checkout (pip install -e .), or take it off the module path",
        )
    for copy in wrong_quacks():
        report.warning(
            f"quack of another version than {dict(BF16.packages)[QUACK]}: {copy}",
            f"the BF16 GEMMs are compiled by {QUACK} {dict(BF16.packages)[QUACK]} alone: run `sonicmoe warmup` where that is the only one",
        )


def examine_flags(report: Report, environ: Mapping[str, str]) -> ResolvedConfig:
    """Fill `flags`; return the configuration in force, with the default in place of each value that
    is not understood.
    """
    values: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.env not in environ:
            report.flags.append(FlagState(flag.env, flag.shown_default, "default"))
            continue
        text = shown = environ[flag.env]
        try:
            values[flag.field] = flag.values.parse(text)
            shown = spelling(values[flag.field])
        # The parser's error is the text behind "needed".
        except ValueError as needed:
            report.error(
                f"{flag.env}={text!r} is not understood", f"set it to {needed}, or unset it"
            )
        report.flags.append(FlagState(flag.env, shown, "environment"))
    return ResolvedConfig.of(values)


def examine_variables(report: Report, environ: Mapping[str, str]) -> None:
    """Report misspelt flags, and honoured variables of other tools that point nowhere."""
    report.unknown_flags = unknown_flags(environ)
    for name, nearest in report.unknown_flags.items():
        remedy = f"did you mean {nearest}?" if nearest else "docs/env.md lists the flags; unset it"
        report.warning(f"{name} is not a flag of this package and is ignored", remedy)
    for name in HONOURED_VARIABLES:
        value = report.honoured[name] = environ.get(name)
        # Caches are made on demand; a compiler or toolkit must be there.
        if value and not name.endswith("_DIR") and not Path(value).exists():
            report.warning(
                f"{name}={value} does not exist", f"point it at an existing path, or unset {name}"
            )


def examine_caches(report: Report, config: ResolvedConfig) -> None:
    """Fill `caches`: the compile cache and its node-local copy, each where it has a place."""
    for flag in FLAGS:
        if flag.values is not DIRECTORY:
            continue
        try:
            path = getattr(config, flag.field)
        except ConfigError as error:
            report.error(str(error), f"set {flag.env} to a directory that can be written")
            continue
        report.caches.append(examine_cache(report, flag, path))


def examine_cache(report: Report, flag: Flag[Path], path: Path) -> CacheState:
    """Look at one cache directory without creating it."""
    role = flag.field.removesuffix("_dir")
    # Doctor creates nothing. Writability and free space of a directory that does not exist yet are
    # those of the parent in which it would be made.
    existing = nearest_existing(path)
    if not existing.is_dir():
        report.error(
            f"{role} {path}: {existing} is not a directory", f"set {flag.env} to a directory"
        )
        return CacheState(role, str(path), path.exists(), False, 0, 0)
    state = CacheState(
        role, str(path), path.exists(), is_writable(existing), tree_size(path), shutil.disk_usage(existing).free,
        warmed_models(path),
    )  # fmt: skip
    if not state.writable:
        report.warning(
            f"{role} {path} is not writable",
            f"only what is already compiled there can be used; set {flag.env}",
        )
    elif state.free_bytes < LOW_SPACE_BYTES:
        report.warning(
            f"{role} {path} has {state.free_bytes >> 20} MiB free",
            f"free some space or set {flag.env}",
        )
    return state


def warmed_models(path: Path) -> tuple[str, ...]:
    """A line for each warm-up record of a cache directory: model, precision, kernels, versions; one
    of another layout is left out.
    """
    lines = []
    for record in read_records(path):
        try:
            model = ", ".join(f"{name}={value}" for name, value in record["model"].items())
            compilers = ", ".join(
                f"{name} {found}" for name, found in record["versions"].items() if found != "absent"
            )
            precision = record.get("precision", "precision not recorded")
            lines.append(
                f"{model}: {precision}, {len(record['kernels'])} kernels at {record['at']} ({compilers})"
            )
        except (KeyError, TypeError, AttributeError):
            continue
    return tuple(lines)


def nearest_existing(path: Path) -> Path:
    """`path` or its closest parent that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def is_writable(directory: Path) -> bool:
    """Whether a file can really be made there (permission bits lie on network and read-only file
    systems).
    """
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def tree_size(path: Path) -> int:
    """Bytes of all files below `path`; a file that vanishes meanwhile counts as nothing."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def choose_framework(report: Report, requested: str) -> str | None:
    """The framework to examine. "auto": Paddle where its GPU build is installed, else PyTorch, else
    Paddle.
    """
    if requested != "auto":
        if is_importable(requested):
            report.framework_reason = "asked for"
            return requested
        report.error(
            f"{requested} is not installed in this Python ({sys.executable})",
            install_hint(requested),
        )
        return None
    found = [name for name in ("torch", "paddle") if is_importable(name)]
    if not found:
        report.error(
            "neither PyTorch nor Paddle is installed",
            f"{install_hint('torch')}, or {install_hint('paddle')}",
        )
        return None
    if len(found) == 1:
        report.framework_reason = "the only one installed"
        return found[0]
    chosen = "paddle" if report.versions["paddlepaddle-gpu"] else "torch"
    other = "paddle" if chosen == "torch" else "torch"
    report.framework_reason = f"both are installed; --framework {other} examines the other"
    return chosen


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


def load_framework(report: Report, name: str) -> bool:
    """Import the framework and the package's border to it; False, with the problem recorded, when
    that fails.
    """
    try:
        switch_to(name)
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # a broken shared library raises either of the last two
        report.error(
            f"{name} does not load: {error}", f"repair or reinstall it: {install_hint(name)}"
        )
        return False
    report.framework = name
    return True


def switch_to(name: str) -> None:
    """Make `name` the framework behind `import torch` in this package.

    Raises:
        FrameworkError: Paddle has no torch proxy, or the package already runs on the other
            framework in this process.
        ImportError: the framework cannot be imported.
    """
    if name == "paddle" and "sonicmoe.interop" not in sys.modules:
        paddle = importlib.import_module("paddle")
        if not hasattr(paddle, "enable_compat"):
            raise FrameworkError(
                f"paddle {paddle.__version__} has no torch proxy; sonicmoe needs paddle >= 3.3.0"
            )
        # Has to happen before any module of the package imports torch; afterwards the binding is
        # fixed for the process.
        paddle.enable_compat(scope={"sonicmoe"}, silent=True)
    loaded = importlib.import_module("sonicmoe.interop").FRAMEWORK
    if loaded != name:
        raise FrameworkError(
            f"sonicmoe already runs on {loaded} in this process; examine {name} in a process of its own"
        )


def examine_engine(report: Report, config: ResolvedConfig) -> None:
    """Fill `device`, `engine` and `self_test` with the framework that was loaded."""
    # Imported by name and late: this half needs the framework that was chosen above.
    selftest = importlib.import_module("sonicmoe.diagnostics.selftest")
    report.device = device = selftest.find_device()
    if device.gpu is None and NVIDIA_DRIVER.exists():
        report.warning(
            f"this machine has an NVIDIA driver but {report.framework} sees no GPU",
            "install its CUDA build",
        )
    try:
        in_force = "fp8" if config.fp8 else "bf16"
        report.engines = selftest.engines_on(device.name)
        choice = selftest.engine_for(config, in_force, device.name)
        report.engine, report.engine_reason = choice.engine.name, choice.reason
        start = time.perf_counter()
        # A GPU engine computes one precision: where it is asked for by name, the other is nobody's.
        tested = (
            PRECISIONS if config.engine in (EngineName.AUTO, EngineName.REFERENCE) else (in_force,)
        )
        report.self_test = [
            check for name in tested for check in selftest.run_self_test(config, name, device.name)
        ]
        report.self_test_seconds = time.perf_counter() - start
    except SonicMoEError as error:
        report.error(str(error), "change the flag it names; docs/env.md lists values and defaults")
    except Exception as error:  # a kernel that crashes is what a self-test is for
        report.error(
            f"self-test crashed: {type(error).__name__}: {error}",
            "rerun with SONIC_MOE_ENGINE=reference and report it",
        )
    failed = [check for check in report.self_test if not check.passed]
    if failed:
        wrong = ", ".join(f"{check.tensor} ({check.precision})" for check in failed)
        engines = " and ".join(sorted({check.engine for check in failed}))
        remedy = "do not train on this engine; SONIC_MOE_ENGINE=reference is exact; report it with `sonicmoe doctor --json`"
        report.error(f"self-test: wrong {wrong} on engine {engines}", remedy)
