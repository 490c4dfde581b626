"""The examination behind `sonicmoe doctor`: versions, framework, device, engine, caches, flags,
self-test, and the problems found.

Imports no framework: `examine` chooses one, loads it, and only then imports the half that computes
(`doctor_engine`).
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..architectures import SM90
from ..config import FLAGS, FLEETS_VARIABLES, HONOURED_VARIABLES, ResolvedConfig, unknown_flags
from ..engine.capabilities import BF16
from ..errors import ConfigError, FrameworkError
from ..flags import DIRECTORY, Flag, spelling
from ..frameworks import FrameworkMissingError, choose, load
from ..host import capabilities_of_host, install_hint
from ..jit.carried import carried
from ..jit.place import Trust, shared_trust, who_can_write
from ..jit.toolchain import find_toolkit
from ..jit.warmup import read_records
from .copies import PACKAGE_ROOT, QUACK, installed_otherwise, other_copies, wrong_quacks
from .doctor_report import CacheState, FlagState, Progress, Report

DISTRIBUTIONS = (
    "torch", "paddlepaddle", "paddlepaddle-gpu", "transformers", "triton", "quack-kernels",
    "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy",
)  # fmt: skip
LOW_SPACE_BYTES = 1 << 30


def examine(
    framework: str = "auto",
    *,
    self_test: bool = False,
    progress: Progress = lambda line: None,
) -> Report:
    """Look at this process's environment, load a framework, run the self-test where its kernels
    are compiled. Never raises for what it finds.

    Args:
        framework: "torch", "paddle" or "auto" (see `frameworks.choose`).
        self_test: compile the kernels that the self-test lacks.
        progress: gets a line before and after everything that may take long.
    """
    report = Report(versions=installed_versions())
    # Copies come first: the rest of the report is about the copy that runs.
    examine_copies(report)
    # Everything up to here works without a framework, so a broken installation still gets a report
    # of its flags and caches.
    config = examine_flags(report, os.environ)
    examine_variables(report, os.environ)
    examine_caches(report, config)
    examine_carried(report)
    name = choose_framework(report, framework)
    progress(f"importing {name}")
    if name is not None and load_framework(report, name):
        # This import binds the package to the framework that was loaded.
        from . import doctor_engine

        with config.activate():
            doctor_engine.examine_engine(report, config, self_test, progress)
    return report


def installed_versions() -> dict[str, str | None]:
    """Installed versions by distribution name, and of nvcc, None where absent; reads metadata,
    imports nothing.
    """
    found: dict[str, str | None] = {"python": platform.python_version(), "sonicmoe": __version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    toolkit = find_toolkit()
    found["nvcc"] = toolkit.version if toolkit else None
    return found


def examine_copies(report: Report) -> None:
    """Warn of other copies of this package, and, unless every GPU here is a Hopper, of quacks that
    its GEMMs are not made for.
    """
    for copy in other_copies():
        report.warning(
            f"there is another sonicmoe: {copy}",
            f"this one is {__version__} from {PACKAGE_ROOT}; import `sonicmoe` before the package "
            "that brings the other, or take the other off the module path",
        )
    installed = installed_otherwise()
    if installed:
        report.warning(
            f"sonicmoe {installed} is installed, but {__version__} runs from {PACKAGE_ROOT}",
            "install this checkout (pip install -e .), or take it off the module path",
        )
    # Hopper's GEMMs are our own, and no version of quack matters there.
    if set(capabilities_of_host()) == {SM90.capability}:
        return
    needed = dict(BF16.packages)[QUACK]
    for copy in wrong_quacks():
        report.warning(
            f"quack of another version than {needed}: {copy}",
            f"the BF16 GEMMs for Blackwell are compiled by {QUACK} {needed} alone: run `sonicmoe "
            "warmup` where that is the only one",
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
            what = f"{flag.env}={text!r} is not understood"
            report.error(what, f"set it to {needed}, or unset it")
        report.flags.append(FlagState(flag.env, shown, "environment"))
    return ResolvedConfig.of(values)


def examine_variables(report: Report, environ: Mapping[str, str]) -> None:
    """Report misspelt flags, and honoured variables of other tools that point nowhere."""
    report.unknown_flags = unknown_flags(environ)
    for name, nearest in report.unknown_flags.items():
        remedy = f"did you mean {nearest}?" if nearest else "docs/env.md lists the flags; unset it"
        # Names that Paddle's Fleet reads are no misspelling, and have advice of their own.
        remedy = FLEETS_VARIABLES.get(name, remedy)
        report.warning(f"{name} is not a flag of this package and is ignored", remedy)
    for name in HONOURED_VARIABLES:
        value = report.honoured[name] = environ.get(name)
        # Caches are made on demand; a compiler or toolkit must be there.
        if value and not name.endswith("_DIR") and not Path(value).exists():
            report.warning(
                f"{name}={value} does not exist", f"point it at an existing path, or unset {name}"
            )
        elif value and name == "CUDA_HOME" and not Path(value, "bin", "nvcc").exists():
            what = f"{name}={value} has no bin/nvcc, so it is ignored"
            report.warning(what, f"point it at a CUDA toolkit, or unset {name}")


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
        state = examine_cache(report, flag, path)
        # The node-local copy is this user's alone, whatever the configuration trusts.
        own = flag.field == "local_cache_dir"
        trust = Trust.OWNER if own else shared_trust(config.trust_cache)
        refused, access = who_can_write(path, trust)
        if refused:
            words = f"{state.role} {path} is not used"
            report.warning(words, f"{refused} (docs/security.md)")
        report.caches.append(replace(state, access=access, refused=refused))


def examine_carried(report: Report) -> None:
    """Fill `carried`, and warn where the loader here is not that of the carried kernels."""
    held = carried()
    if not held.manifests:
        return
    count, archs = len(held.manifests), ", ".join(held.architectures)
    built = f"nvcc {held.versions['nvcc']} for apache-tvm-ffi {held.versions['apache-tvm-ffi']}"
    report.carried = [f"{count} kernels for {archs} by {built}; {held.summary}"]
    report.carried += [f"not inside: {'; '.join(held.left_out)}"] if held.left_out else []
    if held.misfit:
        what, _, remedy = held.misfit.partition("; ")
        report.warning(what, remedy or "install the wheel for this kind of machine")


def examine_cache(report: Report, flag: Flag[Path], path: Path) -> CacheState:
    """Look at one cache directory without creating it."""
    role = flag.field.removesuffix("_dir")
    # Doctor creates nothing. Writability and free space of a directory that does not exist yet are
    # those of the parent in which it would be made.
    existing = nearest_existing(path)
    if not existing.is_dir():
        what = f"{role} {path}: {existing} is not a directory"
        report.error(what, f"set {flag.env} to a directory")
        return CacheState(role, str(path), path.exists(), False, 0, 0)
    state = CacheState(
        role, str(path), path.exists(), is_writable(existing), tree_size(path),
        shutil.disk_usage(existing).free,
        warmed_models(path),
    )  # fmt: skip
    if not state.writable:
        remedy = f"only what is already compiled there can be used; set {flag.env}"
        report.warning(f"{role} {path} is not writable", remedy)
    elif state.free_bytes < LOW_SPACE_BYTES:
        what = f"{role} {path} has {state.free_bytes >> 20} MiB free"
        report.warning(what, f"free some space or set {flag.env}")
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
            kernels = f"{len(record['kernels'])} kernels at {record['at']}"
            lines.append(f"{model}: {precision}, {kernels} ({compilers})")
        # A record of another version may have another layout. It is no problem of this machine.
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
    """The framework to examine; None, with the problem recorded, where it is not installed."""
    try:
        choice = choose(requested)
    except FrameworkMissingError as error:
        report.error(error.what, error.remedy)
        return None
    report.framework_reason = choice.reason
    return choice.name


def load_framework(report: Report, name: str) -> bool:
    """Import the framework; False, with the problem recorded, when that fails."""
    try:
        # tvm_ffi, which Paddle imports, imports PyTorch where it finds it. No check of Paddle needs
        # that, and it would take half of the doctor's time.
        load(name, hidden="torch" if name == "paddle" else None)
    # A broken shared library raises one of the last two.
    except (FrameworkError, OSError, RuntimeError) as error:
        report.error(
            f"{name} does not load: {error}", f"repair or reinstall it: {install_hint(name)}"
        )
        return False
    report.framework = name
    return True
