"""What `sonicmoe doctor` reports, and its look at everything but the engine: versions, other copies,
framework, caches, flags, and the problems found. Imports no framework but by `load_framework`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import FLAGS, FLEETS_VARIABLES, HONOURED_VARIABLES, ResolvedConfig, unknown_flags
from ..errors import ConfigError, FrameworkError
from ..flags import DIRECTORY, spelling
from ..frameworks import FrameworkMissingError, choose, load
from ..host import install_hint
from ..jit.carried import carried
from ..jit.files import describe_problem, probe
from ..jit.key import package_versions
from ..jit.place import Trust, refusal, shared_trust
from ..jit.toolchain import find_toolkit
from ..jit.warmup import read_records

DISTRIBUTIONS = (
    "torch", "paddlepaddle", "paddlepaddle-gpu", "transformers", "triton", "quack-kernels",
    "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy",
)  # fmt: skip
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
CARRIER = "paddlefleet_ops"  # of Paddle; it brings a sonicmoe along inside
# The self-test runs these precisions in this order, in which the screen shows them too.
PRECISIONS = ("bf16", "fp8")
COMPILE_COMMAND = "sonicmoe doctor --self-test"
ERROR, WARNING = "error", "warning"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class DoctorFinding:
    """One finding and what to do about it, a line each. An `ERROR` is a failed check (exit code 1), a
    `WARNING` is worth a look.
    """

    severity: str
    what: str
    remedy: str


@dataclass(frozen=True)
class CacheState:
    """A cache directory.

    `warmed` says what complete warm-ups recorded there: one line a model, with the versions that
    compiled it. `problem`: why kernels are not stored there, or why it is not used at all, because
    others can write there.
    """

    role: str
    path: str
    exists: bool
    warmed: tuple[str, ...]
    problem: str


@dataclass
class Report:
    """Everything on the doctor's screen. A field that could not be found out is None or empty, and
    `problems` says why.

    device: `name`, "cpu" or "cuda:0", `gpu` and `capability` ("9.0"), both None on a CPU.
    engine, engine_reason: what a run would get as configured, in the precision of the flags.
    engines: "able", or why this machine cannot run it, by engine and whatever the model.
    flags: `name`, `value` as one would type it, and `source`, "environment" or "default".
    carried: what kernels lie inside the installed package, and which parts do not; a line each.
    kernels: how many the self-test launches, `needed`, and the names of those not in the cache,
        `missing`.
    self_test: of each tensor `precision`, `engine`, `tensor`, `cosine`, `relative_rmse` (a fraction)
        and `passed`; empty where it did not run, because kernels are not compiled.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    package_path: str = str(PACKAGE_ROOT)
    framework: str | None = None
    framework_reason: str = ""
    device: dict[str, str | None] | None = None
    engine: str | None = None
    engine_reason: str = ""
    engines: dict[str, str] = field(default_factory=dict)
    caches: list[CacheState] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    flags: list[dict[str, str]] = field(default_factory=list)
    honoured: dict[str, str | None] = field(default_factory=dict)
    unknown_flags: dict[str, str | None] = field(default_factory=dict)
    kernels: dict[str, Any] | None = None
    self_test: list[dict[str, Any]] = field(default_factory=list)
    self_test_seconds: float | None = None
    problems: list[DoctorFinding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not any(problem.severity == ERROR for problem in self.problems)

    def error(self, what: str, remedy: str) -> None:
        self.problems.append(DoctorFinding(ERROR, what, remedy))

    def warning(self, what: str, remedy: str) -> None:
        self.problems.append(DoctorFinding(WARNING, what, remedy))


def look_around() -> tuple[Report, ResolvedConfig]:
    """The report of this process's environment, and the configuration in force. Never raises for what
    it finds.
    """
    report = Report(versions=installed_versions())
    # Copies come first: the rest of the report is about the copy that runs.
    examine_copies(report)
    config = examine_flags(report, os.environ)
    examine_variables(report, os.environ)
    examine_caches(report, config)
    examine_carried(report)
    return report, config


def installed_versions() -> dict[str, str | None]:
    """Installed versions by distribution name, and of nvcc, None where absent; reads metadata,
    imports nothing.
    """
    own = {"python": platform.python_version(), "sonicmoe": __version__}
    found: dict[str, str | None] = {**own, **dict(package_versions(*DISTRIBUTIONS))}
    found = {name: None if version == "absent" else version for name, version in found.items()}
    toolkit = find_toolkit()
    found["nvcc"] = toolkit.version if toolkit else None
    return found


def examine_copies(report: Report) -> None:
    """Warn of other copies of this package, because modules of two copies mix where either is imported
    by its short name, and of an installed version that is not the one that runs.
    """
    for copy in other_copies():
        report.warning(
            f"there is another sonicmoe: {copy}",
            f"this one is {__version__} from {PACKAGE_ROOT}; import `sonicmoe` before the package "
            "that brings the other, or take the other off the module path",
        )
    installed = dict(package_versions("sonicmoe"))["sonicmoe"]
    if installed not in ("absent", __version__):
        report.warning(
            f"sonicmoe {installed} is installed, but {__version__} runs from {PACKAGE_ROOT}",
            "install this checkout (pip install -e .), or take it off the module path",
        )


def other_copies() -> list[str]:
    """Version and place of a sonicmoe that can be imported inside `CARRIER`. Imports none: that would
    load CUDA libraries, and mix the copies.
    """
    try:
        spec = importlib.util.find_spec(CARRIER)  # of a top-level name: imports nothing
    except ValueError:  # it is loaded, and has none
        spec = None
    folders = (spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder, "sonicmoe").resolve() for folder in folders]
    return [
        f"{CARRIER}.sonicmoe {_version_of(path)} from {path}"
        for path in paths
        if path != PACKAGE_ROOT and (path / "__init__.py").is_file()
    ]


def _version_of(path: Path) -> str:
    """The version that a package's source states, or "unknown"."""
    text = (path / "__init__.py").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^__version__\s*=\s*[\"']([^\"']+)", text, flags=re.MULTILINE)
    return match.group(1) if match else "unknown"


def examine_flags(report: Report, environ: Mapping[str, str]) -> ResolvedConfig:
    """Fill `flags`; return the configuration in force, with the default in place of each value that
    is not understood.
    """
    values: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.env not in environ:
            report.flags.append(_flag(flag.env, flag.shown_default, "default"))
            continue
        text = shown = environ[flag.env]
        try:
            values[flag.field] = flag.values.parse(text)
            shown = spelling(values[flag.field])
        # The parser's error is the text behind "needed".
        except ValueError as needed:
            what = f"{flag.env}={text!r} is not understood"
            report.error(what, f"set it to {needed}, or unset it")
        report.flags.append(_flag(flag.env, shown, "environment"))
    return ResolvedConfig.of(values)


def _flag(name: str, value: str, source: str) -> dict[str, str]:
    return {"name": name, "value": value, "source": source}


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
        role = flag.field.removesuffix("_dir")
        # The node-local copy is this user's alone, whatever the configuration trusts.
        own = flag.field == "local_cache_dir"
        refused = refusal(path, Trust.OWNER if own else shared_trust(config.trust_cache))
        problem = refused or blocked(path)
        if refused:
            report.warning(f"{role} {path} is not used", f"{refused} (docs/security.md)")
        elif problem:
            remedy = f"what is already compiled there can be used; set {flag.env} to another one"
            report.warning(f"{role} {path} takes no kernels: {problem}", remedy)
        state = CacheState(role, str(path), path.exists(), warmed_models(path), problem)
        report.caches.append(state)


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


def blocked(path: Path) -> str:
    """Why a kernel cannot be stored in a directory, or ""; of one that does not exist, in the parent
    where it would be made. Creates nothing that stays.
    """
    places = (path.absolute(), *path.absolute().parents)
    try:
        probe(next(place for place in places if place.exists()))
    except OSError as error:
        return describe_problem(error)
    return ""


def load_framework(report: Report, requested: str, progress: Progress) -> bool:
    """Choose a framework and import it; False, with the problem recorded, where that fails."""
    try:
        choice = choose(requested)
    except FrameworkMissingError as error:
        report.error(error.what, error.remedy)
        return False
    report.framework_reason, name = choice.reason, choice.name
    progress(f"importing {name}")
    try:
        # tvm_ffi, which Paddle imports, imports PyTorch where it finds it. No check of Paddle needs
        # that, and it would take half of the doctor's time.
        load(name, hidden="torch" if name == "paddle" else None)
    # A broken shared library raises one of the last two.
    except (FrameworkError, OSError, RuntimeError) as error:
        remedy = f"repair or reinstall it: {install_hint(name)}"
        report.error(f"{name} does not load: {error}", remedy)
        return False
    report.framework = name
    return True
